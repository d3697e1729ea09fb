// A transformer trained for 20 steps: the losses are those of one rank, whatever the sharding.
#include "tessera/models/loss.h"
#include "tessera/models/sizes.h"
#include "tessera/nn/checkpoint_wrapper.h"
#include "tessera/optim/adam.h"
#include "tessera/tensor_parallel/parallelize_module.h"
#include "tests/fixtures/fsdp.h"

namespace tessera {
namespace {

using namespace fixtures;
using models::GPT2;
using models::Llama;

constexpr int64_t kSteps = 20;

// Trains on part `rank` of `ranks` of the batch. Returns the losses, averaged over the group if there is one.
template <class Model>
std::vector<double> train(Model& model, const TokenBatch& data, int64_t rank, int64_t ranks,
                          const comm::Group& group = {}) {
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

template <class Model>
ShardFn<Model> checkpointed(ShardFn<Model> shard) {
  return [=](Model& model, Rank& me) {
    for (auto& block : blocks_of(model)) checkpoint_wrapper(block);
    shard(model, me);
  };
}
// Shards over dp of a mesh dp=2,tp=2. Both ranks of a tp group have the same data.
enum class Api { FullyShard, Flat };
template <class Model>
ShardFn<Model> over_tensor_parallel(Api api) {
  return [=](Model& model, Rank& me) {
    const auto mesh = me.mesh("dp=2,tp=2");
    parallelize_module(model, mesh["tp"], models::tensor_parallel_plan(config_of(model)));
    if (api == Api::FullyShard)
      shard_blocks(model, {.mesh = mesh["dp"]});
    else
      shard_blocks_flat(model, {.device_mesh = mesh["dp"], .use_orig_params = true});
  };
}

template <class Model>
struct TransformerCase {
  const char* name;
  int64_t ranks;
  ShardFn<Model> shard;
  double tolerance = 1e-5;
  int64_t tensor_parallel = 1;
};

template <class Model>
std::vector<TransformerCase<Model>> cases() {
  using S = ShardingStrategy;
  const auto strategy = [](S s, bool orig) { return FSDPOptions{.sharding_strategy = s, .use_orig_params = orig}; };
  const MixedPrecisionPolicy bf16{.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat};
  return {
      {"fully_shard, one rank", 1, fully_sharded<Model>("dp=1")},
      {"fully_shard", 2, fully_sharded<Model>("dp=2")},
      {"fully_shard, no reshard after forward", 2, fully_sharded<Model>("dp=2", {.reshard_after_forward = false})},
      {"fully_shard, four ranks", 4, fully_sharded<Model>("dp=4")},
      {"HSDP", 4, fully_sharded<Model>("replicate=2,shard=2")},
      {"fully_shard, bfloat16", 2, fully_sharded<Model>("dp=2", {.mp_policy = bf16}), 1e-2},
      {"fully_shard, checkpointed", 2, checkpointed(fully_sharded<Model>("dp=2"))},
      {"FULL_SHARD", 2, flat_sharded<Model>("dp=2")},
      {"FULL_SHARD, use_orig_params", 4, flat_sharded<Model>("dp=4", strategy(S::FullShard, true))},
      {"SHARD_GRAD_OP", 2, flat_sharded<Model>("dp=2", strategy(S::ShardGradOp, true))},
      {"NO_SHARD", 2, flat_sharded<Model>("dp=2", strategy(S::NoShard, false))},
      {"HYBRID_SHARD", 4, flat_sharded<Model>("replicate=2,shard=2", strategy(S::HybridShard, true))},
      {"_HYBRID_SHARD_ZERO2", 4, flat_sharded<Model>("replicate=2,shard=2", strategy(S::HybridShardZero2, false))},
      {"offloaded", 2, flat_sharded<Model>("dp=2", {.offload_params = true})},
      {"FULL_SHARD, checkpointed", 2, checkpointed(flat_sharded<Model>("dp=2"))},
      {"fully_shard x TP", 4, over_tensor_parallel<Model>(Api::FullyShard), 1e-5, 2},
      {"FULL_SHARD x TP", 4, over_tensor_parallel<Model>(Api::Flat), 1e-5, 2},
  };
}

template <class Model>
void expect_losses_of_one_rank(const Model& start, const std::vector<TransformerCase<Model>>& cases) {
  const auto data = random_tokens();
  auto alone = clone(start);
  const auto wanted = train(alone, data, 0, 1);
  ASSERT_LT(wanted.back(), wanted.front() - 0.1);  // the loss decreases
  for (const auto& c : cases) {
    SCOPED_TRACE(c.name);
    run_ranks(c.ranks, [&](Rank& me) {
      auto model = clone(start);
      c.shard(model, me);
      const auto found =
          train(model, data, me.rank / c.tensor_parallel, c.ranks / c.tensor_parallel,
                me.mesh(c10::str("dp=", c.ranks / c.tensor_parallel, ",tp=", c.tensor_parallel)).get_group("dp"));
      for (size_t step = 0; step < found.size(); step++) EXPECT_NEAR(found[step], wanted[step], c.tolerance) << step;
    });
  }
}

TEST(FsdpTransformer, Gpt2TrainsAsOnOneRank) {
  torch::manual_seed(7);
  expect_losses_of_one_rank(GPT2(kTinyGPT2), cases<GPT2>());
}

TEST(FsdpTransformer, LlamaTrainsAsOnOneRank) {
  torch::manual_seed(7);
  expect_losses_of_one_rank(Llama(kTinyLlama),
                            {{"fully_shard", 2, fully_sharded<Llama>("dp=2")},
                             {"HSDP", 4, fully_sharded<Llama>("replicate=2,shard=2")},
                             {"FULL_SHARD", 2, flat_sharded<Llama>("dp=2")},
                             {"fully_shard x TP", 4, over_tensor_parallel<Llama>(Api::FullyShard), 1e-5, 2}});
}

}  // namespace
}  // namespace tessera
