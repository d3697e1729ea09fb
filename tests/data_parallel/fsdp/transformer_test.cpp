// A transformer trained for 20 steps: whatever is cut and however, the losses are those of one rank.
#include "tessera/data_parallel/fsdp/fully_shard.h"
#include "tessera/data_parallel/fsdp/fully_sharded_data_parallel.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/models/gpt2.h"
#include "tessera/models/llama.h"
#include "tessera/models/loss.h"
#include "tessera/models/plans.h"
#include "tessera/nn/checkpoint_wrapper.h"
#include "tessera/optim/adam.h"
#include "tessera/tensor_parallel/parallelize_module.h"
#include "tessera/testing/ranks.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

namespace tessera {
namespace {

using models::GPT2;
using models::Llama;
using testing::Rank;
using testing::run_ranks;

constexpr int64_t kSteps = 20, kBatch = 4, kLength = 7, kVocabulary = 13;
// Numbers of rows that do not divide by the ranks.
const models::GPT2Config kGpt{
    .vocab_size = kVocabulary, .max_seq_len = 9, .n_layer = 2, .n_head = 2, .n_embd = 12, .bias = true};
const models::LlamaConfig kLlama{.vocab_size = kVocabulary,
                                 .max_seq_len = 9,
                                 .n_layers = 2,
                                 .n_heads = 4,
                                 .n_kv_heads = 2,
                                 .dim = 16,
                                 .ffn_dim = 20,
                                 .rope_theta = 100};
auto& blocks_of(GPT2& model) { return model->h; }
auto& blocks_of(Llama& model) { return model->layers; }
const auto& config_of(const GPT2&) { return kGpt; }
const auto& config_of(const Llama&) { return kLlama; }

struct Data {
  at::Tensor tokens = torch::randint(kVocabulary, {kBatch, kLength}, torch::kLong);
  at::Tensor targets = torch::randint(kVocabulary, {kBatch, kLength}, torch::kLong);
};

// On part `rank` of `ranks` of the batch; losses, averaged over the group if there is one.
template <class Model>
std::vector<double> train(Model& model, const Data& data, int64_t rank, int64_t ranks, const comm::Group& group = {}) {
  optim::AdamW optimizer(model->parameters(), {.lr = 0.003, .eps = 1e-5});
  std::vector<double> losses;
  for (int64_t step = 0; step < kSteps; step++) {
    optimizer.zero_grad();
    const auto loss =
        models::loss(model(data.tokens.chunk(ranks)[rank]).to(at::kFloat), data.targets.chunk(ranks)[rank]);
    loss.backward();
    auto mean = loss.detach() / ranks;
    if (group) group->all_reduce(mean, ReduceOp::Sum).wait();
    losses.push_back(mean.template item<double>());
    optimizer.step();
  }
  return losses;
}

// What is done to a rank's copy of the model, the inner units first.
template <class Model>
using Cut = std::function<void(Model& model, Rank& me)>;

template <class Model>
Cut<Model> fully_sharded(const std::string& mesh, const FullyShardOptions& given = {}) {
  return [=](Model& model, Rank& me) {
    auto options = given;
    options.mesh = me.mesh(mesh);
    for (auto& block : blocks_of(model)) fully_shard(block, options);
    fully_shard(model, options);
  };
}
template <class Model>
Cut<Model> flat(const std::string& mesh, const FSDPOptions& given = {}) {
  return [=](Model& model, Rank& me) {
    auto options = given;
    options.device_mesh = me.mesh(mesh);
    for (auto& block : blocks_of(model)) FullyShardedDataParallel(block, options);
    FullyShardedDataParallel wrapped(model, options);
  };
}
template <class Model>
Cut<Model> checkpointed(Cut<Model> cut) {
  return [=](Model& model, Rank& me) {
    for (auto& block : blocks_of(model)) checkpoint_wrapper(block);
    cut(model, me);
  };
}
// `cut` is over dp of a mesh dp=2,tp=2; both ranks of a tp group have the same data.
enum class Api { FullyShard, Flat };
template <class Model>
Cut<Model> over_tensor_parallel(Api api) {
  return [=](Model& model, Rank& me) {
    const auto mesh = me.mesh("dp=2,tp=2");
    parallelize_module(model, mesh["tp"], models::tensor_parallel_plan(config_of(model)));
    const auto cut = [&](auto& module) {
      if (api == Api::FullyShard)
        fully_shard(module, {.mesh = mesh["dp"]});
      else
        FullyShardedDataParallel(module, {.device_mesh = mesh["dp"], .use_orig_params = true});
    };
    for (auto& block : blocks_of(model)) cut(block);
    cut(model);
  };
}

template <class Model>
struct Case {
  const char* name;
  int64_t ranks;
  Cut<Model> cut;
  double tolerance = 1e-5;
  int64_t tensor_parallel = 1;
};

template <class Model>
std::vector<Case<Model>> cases() {
  using S = ShardingStrategy;
  const auto strategy = [](S s, bool orig) { return FSDPOptions{.sharding_strategy = s, .use_orig_params = orig}; };
  const MixedPrecisionPolicy bf16{.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat};
  return {
      {"fully_shard, one rank", 1, fully_sharded<Model>("dp=1")},
      {"fully_shard", 2, fully_sharded<Model>("dp=2")},
      {"fully_shard, kept", 2, fully_sharded<Model>("dp=2", {.reshard_after_forward = false})},
      {"fully_shard, four ranks", 4, fully_sharded<Model>("dp=4")},
      {"HSDP", 4, fully_sharded<Model>("replicate=2,shard=2")},
      {"fully_shard, bfloat16", 2, fully_sharded<Model>("dp=2", {.mp_policy = bf16}), 1e-2},
      {"fully_shard, checkpointed", 2, checkpointed(fully_sharded<Model>("dp=2"))},
      {"FULL_SHARD", 2, flat<Model>("dp=2")},
      {"FULL_SHARD, originals", 4, flat<Model>("dp=4", strategy(S::FullShard, true))},
      {"SHARD_GRAD_OP", 2, flat<Model>("dp=2", strategy(S::ShardGradOp, true))},
      {"NO_SHARD", 2, flat<Model>("dp=2", strategy(S::NoShard, false))},
      {"HYBRID_SHARD", 4, flat<Model>("replicate=2,shard=2", strategy(S::HybridShard, true))},
      {"_HYBRID_SHARD_ZERO2", 4, flat<Model>("replicate=2,shard=2", strategy(S::HybridShardZero2, false))},
      {"offloaded", 2, flat<Model>("dp=2", {.offload_params = true})},
      {"FULL_SHARD, checkpointed", 2, checkpointed(flat<Model>("dp=2"))},
      {"fully_shard x TP", 4, over_tensor_parallel<Model>(Api::FullyShard), 1e-5, 2},
      {"FULL_SHARD x TP", 4, over_tensor_parallel<Model>(Api::Flat), 1e-5, 2},
  };
}

template <class Model>
void trains_as_one_rank(const Model& start, const std::vector<Case<Model>>& cases) {
  const Data data;
  auto alone = clone(start);
  const auto wanted = train(alone, data, 0, 1);
  ASSERT_LT(wanted.back(), wanted.front() - 0.1);  // it learns
  for (const auto& c : cases) {
    SCOPED_TRACE(c.name);
    run_ranks(c.ranks, [&](Rank& me) {
      auto model = clone(start);
      c.cut(model, me);
      const auto found =
          train(model, data, me.rank / c.tensor_parallel, c.ranks / c.tensor_parallel,
                me.mesh(c10::str("dp=", c.ranks / c.tensor_parallel, ",tp=", c.tensor_parallel)).get_group("dp"));
      for (size_t step = 0; step < found.size(); step++) EXPECT_NEAR(found[step], wanted[step], c.tolerance) << step;
    });
  }
}

TEST(FsdpTransformer, Gpt2TrainsAsOnOneRank) {
  torch::manual_seed(7);
  trains_as_one_rank(GPT2(kGpt), cases<GPT2>());
}

TEST(FsdpTransformer, LlamaTrainsAsOnOneRank) {
  torch::manual_seed(7);
  trains_as_one_rank(Llama(kLlama), {{"fully_shard", 2, fully_sharded<Llama>("dp=2")},
                                     {"HSDP", 4, fully_sharded<Llama>("replicate=2,shard=2")},
                                     {"FULL_SHARD", 2, flat<Llama>("dp=2")},
                                     {"fully_shard x TP", 4, over_tensor_parallel<Llama>(Api::FullyShard), 1e-5, 2}});
}

}  // namespace
}  // namespace tessera
