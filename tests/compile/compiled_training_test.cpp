// Compiled training equals eager training: four models, five kinds of parallelism, 20 steps. Losses and parameters are
// bitwise equal with passes that keep the order of additions; with passes that merge or move collectives, to 1e-5.
#include "tessera/compile/api/compile.h"
#include "tessera/data_parallel/distributed_data_parallel.h"
#include "tessera/data_parallel/fsdp/fully_shard.h"
#include "tessera/models/gpt2.h"
#include "tessera/models/llama.h"
#include "tessera/models/loss.h"
#include "tessera/models/mlp.h"
#include "tessera/models/sizes.h"
#include "tessera/nn/module_tree.h"
#include "tessera/optim/adam.h"
#include "tessera/optim/sgd.h"
#include "tessera/tensor_parallel/parallelize_module.h"
#include "tessera/testing/assert_close.h"
#include "tessera/testing/ranks.h"

#include "tests/fixtures/full_tensor.h"
#include "tests/fixtures/transformers.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

namespace tessera {
namespace {

using fixtures::full_tensor;
using fixtures::kTinyGPT2;
using fixtures::kTinyLlama;
using fixtures::kVocabulary;
using testing::Rank;
using testing::run_ranks;

struct TrainedConvNetImpl : torch::nn::Cloneable<TrainedConvNetImpl> {
  TrainedConvNetImpl() { reset(); }
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
TESSERA_MODULE(TrainedConvNet);

constexpr int64_t kTrainingSteps = 20, kBatch = 4;
struct Batch {
  at::Tensor x, y;
  friend void tessera_visit(Batch& batch, auto&& field) { field(batch.x), field(batch.y); }
};

// What the test needs to know of a model: construction, data, loss, tensor parallel plan, FSDP units.
template <class Model>
struct ModelTraits;

template <>
struct ModelTraits<models::MLP> {
  static models::MLP make() { return models::MLP(models::mlp_module()); }
  static Batch data() { return {torch::randn({kBatch, 10}), torch::randn({kBatch, 10})}; }
  static at::Tensor loss(const at::Tensor& out, const at::Tensor& y) { return torch::mse_loss(out, y); }
  static Plan plan() { return {{"net1", ColwiseParallel()}, {"net2", RowwiseParallel()}}; }
  static void each_unit(models::MLP& model, auto&& f) {
    for (auto& layer : model->layers) f(layer);
  }
};
template <>
struct ModelTraits<TrainedConvNet> {
  static TrainedConvNet make() { return {}; }
  static Batch data() { return {torch::randn({kBatch, 2, 6, 6}), torch::randint(5, {kBatch})}; }
  static at::Tensor loss(const at::Tensor& out, const at::Tensor& y) { return torch::cross_entropy_loss(out, y); }
  static Plan plan() { return {{"up", ColwiseParallel()}, {"down", RowwiseParallel()}}; }
  static void each_unit(TrainedConvNet& model, auto&& f) { f(model->conv), f(model->up), f(model->down); }
};
template <class Model, const auto& config>
struct Transformer {
  static Model make() { return Model(config); }
  static Batch data() { return {torch::randint(kVocabulary, {kBatch, 7}), torch::randint(kVocabulary, {kBatch, 7})}; }
  static at::Tensor loss(const at::Tensor& out, const at::Tensor& y) { return models::loss(out, y); }
  static Plan plan() { return models::tensor_parallel_plan(config); }
};
template <>
struct ModelTraits<models::GPT2> : Transformer<models::GPT2, kTinyGPT2> {
  static void each_unit(models::GPT2& model, auto&& f) {
    for (auto& block : model->h) f(block);
  }
};
template <>
struct ModelTraits<models::Llama> : Transformer<models::Llama, kTinyLlama> {
  static void each_unit(models::Llama& model, auto&& f) {
    for (auto& block : model->layers) f(block);
  }
};

enum class Parallelism { Single, DDP, FSDP, TP, FSDPxTP };
constexpr int64_t ranks_of(Parallelism parallelism) {
  return parallelism == Parallelism::Single ? 1 : parallelism == Parallelism::FSDPxTP ? 4 : 2;
}

template <class Model>
void parallelize(Model& model, Parallelism parallelism, Rank& me) {
  const auto shard = [&](const DeviceMesh& mesh) {
    ModelTraits<Model>::each_unit(model, [&](auto& unit) { fully_shard(unit, {.mesh = mesh}); });
    fully_shard(model, {.mesh = mesh});
  };
  if (parallelism == Parallelism::TP) parallelize_module(model, me.mesh("tp=2"), ModelTraits<Model>::plan());
  if (parallelism == Parallelism::FSDP) shard(me.mesh("dp=2"));
  if (parallelism == Parallelism::FSDPxTP) {
    const auto mesh = me.mesh("dp=2,tp=2");
    parallelize_module(model, mesh["tp"], ModelTraits<Model>::plan());
    shard(mesh["dp"]);
  }
}

template <class Model>
const auto kStep = [](auto& model, auto& opt, const Batch& batch) {
  opt.zero_grad();
  auto loss = ModelTraits<Model>::loss(model(batch.x), batch.y);
  loss.backward();
  opt.step();
  return loss;
};

struct TrainingResult {
  std::vector<at::Tensor> losses, parameters;
};

// Trains a model eagerly, or compiled if there are options.
template <class Model, class Opt>
TrainingResult train(Model model, Parallelism parallelism, const Opt& make_optimizer, const std::vector<Batch>& batches,
                     Rank& me, const std::optional<CompileOptions>& options) {
  parallelize(model, parallelism, me);
  auto opt = make_optimizer(model->parameters());
  TrainingResult trained;
  const auto run = [&](auto& step, auto& callable) {
    for (const auto& batch : batches) trained.losses.push_back(full_tensor(step(callable, opt, batch)).clone());
  };
  const auto run_all = [&](auto& callable) {
    if (!options) return run(kStep<Model>, callable);
    auto step = compile(kStep<Model>, *options);
    run(step, callable);
  };
  if (parallelism == Parallelism::DDP) {
    DistributedDataParallel<Model> ddp(model, {.device_mesh = me.mesh("dp=2")});
    run_all(ddp);
  } else {
    run_all(model);
  }
  for (const auto& p : model->parameters()) trained.parameters.push_back(full_tensor(p.detach()).clone());
  return trained;
}

// Passes that do not change any value.
const PassList kExactPasses = {"functionalise", "fold_views",          "constant_folding",   "common_subexpressions",
                               "dead_code",     "hoist_communication", "schedule_comm_wait", "overlap_communication"};
// These merge and move collectives, which changes the order of additions.
const PassList kReassociatingPasses = {"functionalise",
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

void expect_same(const TrainingResult& found, const TrainingResult& wanted, bool exact) {
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
  for (const auto parallelism :
       {Parallelism::Single, Parallelism::DDP, Parallelism::FSDP, Parallelism::TP, Parallelism::FSDPxTP}) {
    const auto start = ModelTraits<Model>::make();
    std::vector<std::vector<Batch>> data(4);  // by data-parallel rank
    for (auto& of_rank : data)
      for (int64_t i = 0; i < kTrainingSteps; i++) of_rank.push_back(ModelTraits<Model>::data());
    run_ranks(ranks_of(parallelism), [&](Rank& me) {
      const bool data_parallel =
          parallelism == Parallelism::DDP || parallelism == Parallelism::FSDP || parallelism == Parallelism::FSDPxTP;
      const auto& batches = data[static_cast<size_t>(!data_parallel                        ? 0
                                                     : parallelism == Parallelism::FSDPxTP ? me.rank / 2
                                                                                           : me.rank)];
      const auto sgd = [](const auto& p) { return optim::SGD(p, {.lr = 0.05, .momentum = 0.9}); };
      const auto adam = [](const auto& p) { return optim::AdamW(p, {.lr = 0.01, .fused = true}); };
      const auto compare = [&](const auto& make_optimizer, const CompileOptions& options, bool exact) {
        const auto wanted = train(clone(start), parallelism, make_optimizer, batches, me, {});
        const auto found = train(clone(start), parallelism, make_optimizer, batches, me, options);
        expect_same(found, wanted, exact);
      };
      SCOPED_TRACE(c10::str("parallelism ", static_cast<int>(parallelism)));
      compare(adam, {.passes = kExactPasses, .verified = true, .numerics = Numerics::Strict}, true);
      compare(sgd, {.passes = kReassociatingPasses, .codegen = false, .verified = true}, false);
    });
    if (::testing::Test::HasFailure()) return;
  }
}

TEST(CompiledTraining, MLP) { compare_all<models::MLP>(); }
TEST(CompiledTraining, TrainedConvNet) { compare_all<TrainedConvNet>(); }
TEST(CompiledTraining, GPT2) { compare_all<models::GPT2>(); }
TEST(CompiledTraining, Llama) { compare_all<models::Llama>(); }

}  // namespace
}  // namespace tessera
