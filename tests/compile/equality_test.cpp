// Compiled training is eager training: four models, cut in five ways, 20 steps. Without passes that merge or place
// collectives bit for bit, losses, parameters and gradients; with them losses to 1e-5.
#include "tessera/compile/api/compile.h"
#include "tessera/data_parallel/distributed_data_parallel.h"
#include "tessera/data_parallel/fsdp/fully_shard.h"
#include "tessera/models/gpt2.h"
#include "tessera/models/llama.h"
#include "tessera/models/loss.h"
#include "tessera/models/mlp.h"
#include "tessera/models/plans.h"
#include "tessera/nn/module_tree.h"
#include "tessera/optim/adam.h"
#include "tessera/optim/sgd.h"
#include "tessera/tensor_parallel/parallelize_module.h"
#include "tessera/testing/assert_close.h"
#include "tessera/testing/ranks.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

namespace tessera {
namespace {

using testing::Rank;
using testing::run_ranks;

struct ConvNetImpl : torch::nn::Cloneable<ConvNetImpl> {
  ConvNetImpl() { reset(); }
  void reset() override {
    conv = register_module("conv", nn::Conv2d(torch::nn::Conv2dOptions(2, 4, 3).padding(1)));
    norm = register_module("norm", nn::BatchNorm2d(4));
    up = register_module("up", nn::Linear(4 * 3 * 3, 8));
    down = register_module("down", nn::Linear(8, 5));
  }
  at::Tensor forward(const at::Tensor& x) {
    const auto pooled = torch::max_pool2d(norm(conv(x)).relu(), 2);
    return down(up(pooled.flatten(1)).relu());
  }
  nn::Conv2d conv{nullptr};
  nn::BatchNorm2d norm{nullptr};
  nn::Linear up{nullptr}, down{nullptr};
};
TESSERA_MODULE(ConvNet);

constexpr int64_t kSteps = 20, kBatch = 4, kVocabulary = 13;
const models::GPT2Config kGpt{.vocab_size = kVocabulary, .max_seq_len = 9, .n_layer = 2, .n_head = 2, .n_embd = 12};
const models::LlamaConfig kLlama{.vocab_size = kVocabulary,
                                 .max_seq_len = 9,
                                 .n_layers = 2,
                                 .n_heads = 4,
                                 .n_kv_heads = 2,
                                 .dim = 16,
                                 .ffn_dim = 20,
                                 .rope_theta = 100};

struct Batch {
  at::Tensor x, y;
  friend void tessera_visit(Batch& batch, auto&& field) { field(batch.x), field(batch.y); }
};

// What is particular to a model: how to make it, its data, its loss, its units and its plan.
template <class Model>
struct Of;

template <>
struct Of<models::MLP> {
  static models::MLP make() { return models::MLP(models::mlp_module()); }
  static Batch data() { return {torch::randn({kBatch, 10}), torch::randn({kBatch, 10})}; }
  static at::Tensor loss(const at::Tensor& out, const at::Tensor& y) { return torch::mse_loss(out, y); }
  static Plan plan() { return {{"net1", ColwiseParallel()}, {"net2", RowwiseParallel()}}; }
  static void each_unit(models::MLP& model, auto&& f) {
    for (auto& layer : model->layers) f(layer);
  }
};
template <>
struct Of<ConvNet> {
  static ConvNet make() { return {}; }
  static Batch data() { return {torch::randn({kBatch, 2, 6, 6}), torch::randint(5, {kBatch})}; }
  static at::Tensor loss(const at::Tensor& out, const at::Tensor& y) { return torch::cross_entropy_loss(out, y); }
  static Plan plan() { return {{"up", ColwiseParallel()}, {"down", RowwiseParallel()}}; }
  static void each_unit(ConvNet& model, auto&& f) { f(model->conv), f(model->up), f(model->down); }
};
template <class Model, const auto& config>
struct Transformer {
  static Model make() { return Model(config); }
  static Batch data() { return {torch::randint(kVocabulary, {kBatch, 7}), torch::randint(kVocabulary, {kBatch, 7})}; }
  static at::Tensor loss(const at::Tensor& out, const at::Tensor& y) { return models::loss(out, y); }
  static Plan plan() { return models::tensor_parallel_plan(config); }
};
template <>
struct Of<models::GPT2> : Transformer<models::GPT2, kGpt> {
  static void each_unit(models::GPT2& model, auto&& f) {
    for (auto& block : model->h) f(block);
  }
};
template <>
struct Of<models::Llama> : Transformer<models::Llama, kLlama> {
  static void each_unit(models::Llama& model, auto&& f) {
    for (auto& block : model->layers) f(block);
  }
};

enum class Way { Single, DDP, FSDP, TP, FSDPxTP };
constexpr int64_t ranks_of(Way way) { return way == Way::Single ? 1 : way == Way::FSDPxTP ? 4 : 2; }

template <class Model>
void cut(Model& model, Way way, Rank& me) {
  const auto shard = [&](const DeviceMesh& mesh) {
    Of<Model>::each_unit(model, [&](auto& unit) { fully_shard(unit, {.mesh = mesh}); });
    fully_shard(model, {.mesh = mesh});
  };
  if (way == Way::TP) parallelize_module(model, me.mesh("tp=2"), Of<Model>::plan());
  if (way == Way::FSDP) shard(me.mesh("dp=2"));
  if (way == Way::FSDPxTP) {
    const auto mesh = me.mesh("dp=2,tp=2");
    parallelize_module(model, mesh["tp"], Of<Model>::plan());
    shard(mesh["dp"]);
  }
}

template <class Model>
const auto kStep = [](auto& model, auto& opt, const Batch& batch) {
  opt.zero_grad();
  auto loss = Of<Model>::loss(model(batch.x), batch.y);
  loss.backward();
  opt.step();
  return loss;
};

at::Tensor whole(const at::Tensor& t) { return is_dtensor(t) ? DTensor(t).full_tensor() : t; }

struct Trained {
  std::vector<at::Tensor> losses, parameters;
};

// With DDP `model` is what is wrapped.
template <class Model, class Opt>
Trained train(Model model, Way way, const Opt& make_optimizer, const std::vector<Batch>& batches, Rank& me,
              const std::optional<CompileOptions>& options) {
  cut(model, way, me);
  auto opt = make_optimizer(model->parameters());
  Trained trained;
  const auto run = [&](auto& step, auto& callable) {
    for (const auto& batch : batches) trained.losses.push_back(whole(step(callable, opt, batch)).clone());
  };
  const auto run_all = [&](auto& callable) {
    if (!options) return run(kStep<Model>, callable);
    auto step = compile(kStep<Model>, *options);
    run(step, callable);
  };
  if (way == Way::DDP) {
    DistributedDataParallel<Model> ddp(model, {.device_mesh = me.mesh("dp=2")});
    run_all(ddp);
  } else {
    run_all(model);
  }
  for (const auto& p : model->parameters()) trained.parameters.push_back(whole(p.detach()).clone());
  return trained;
}

// All that is computed stays as it is.
const PassList kExact = {"functionalise", "fold_views",          "constant_folding",   "common_subexpressions",
                         "dead_code",     "hoist_communication", "schedule_comm_wait", "overlap_communication"};
// Collectives are merged and placed otherwise, which adds up in another order.
const PassList kMerging = {"functionalise",
                           "fold_views",
                           "constant_folding",
                           "common_subexpressions",
                           "dead_code",
                           "cancel_collectives",
                           "place_redistributes",
                           "hoist_communication",
                           "fuse_ddp_with_concat_op",
                           "bucket_all_gathers",
                           "prefetch_all_gathers",
                           "bucket_reduce_scatters",
                           "merge_collectives",
                           "schedule_comm_wait"};

void expect_same(const Trained& found, const Trained& wanted, bool exact) {
  for (size_t i = 0; i < wanted.losses.size(); i++) {
    if (exact) {
      ASSERT_TRUE(at::equal(found.losses[i], wanted.losses[i])) << "step " << i;
    } else {
      const auto loss = wanted.losses[i].item<double>();
      ASSERT_NEAR(found.losses[i].item<double>(), loss, 1e-5 * std::abs(loss)) << "step " << i;
    }
  }
  for (size_t i = 0; i < wanted.parameters.size(); i++)
    EXPECT_TRUE(exact ? at::equal(found.parameters[i], wanted.parameters[i])
                      : at::allclose(found.parameters[i], wanted.parameters[i], 1.3e-6, 1e-5))
        << "parameter " << i;
}

template <class Model>
void compare_all() {
  for (const auto way : {Way::Single, Way::DDP, Way::FSDP, Way::TP, Way::FSDPxTP}) {
    const auto start = Of<Model>::make();
    std::vector<std::vector<Batch>> data(4);  // by data-parallel rank
    for (auto& of_rank : data)
      for (int64_t i = 0; i < kSteps; i++) of_rank.push_back(Of<Model>::data());
    run_ranks(ranks_of(way), [&](Rank& me) {
      const bool data_parallel = way == Way::DDP || way == Way::FSDP || way == Way::FSDPxTP;
      const auto& batches = data[static_cast<size_t>(!data_parallel ? 0 : way == Way::FSDPxTP ? me.rank / 2 : me.rank)];
      const auto sgd = [](const auto& p) { return optim::SGD(p, {.lr = 0.05, .momentum = 0.9}); };
      const auto adam = [](const auto& p) { return optim::AdamW(p, {.lr = 0.01, .fused = true}); };
      const auto compare = [&](const auto& make_optimizer, const CompileOptions& options, bool exact) {
        const auto wanted = train(clone(start), way, make_optimizer, batches, me, {});
        const auto found = train(clone(start), way, make_optimizer, batches, me, options);
        expect_same(found, wanted, exact);
      };
      SCOPED_TRACE(c10::str("way ", static_cast<int>(way)));
      compare(adam, {.passes = kExact, .codegen = false, .verified = true}, true);
      compare(sgd, {.passes = kMerging, .codegen = false, .verified = true}, false);
    });
    if (::testing::Test::HasFailure()) return;
  }
}

TEST(Equality, MLP) { compare_all<models::MLP>(); }
TEST(Equality, ConvNet) { compare_all<ConvNet>(); }
TEST(Equality, GPT2) { compare_all<models::GPT2>(); }
TEST(Equality, Llama) { compare_all<models::Llama>(); }

}  // namespace
}  // namespace tessera
