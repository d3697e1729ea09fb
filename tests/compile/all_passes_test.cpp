// All passes, in the order of known_passes(), on training steps. The program is verified after each pass, and the
// results equal eager.
#include "tessera/compile/api/compile.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/models/mlp.h"
#include "tessera/nn/holder.h"
#include "tessera/nn/module_tree.h"
#include "tessera/nn/modules.h"
#include "tessera/optim/adam.h"
#include "tessera/optim/sgd.h"
#include "tessera/testing/ranks.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

namespace tessera {
namespace {

using models::MLP;
using testing::Rank;
using testing::run_ranks;

struct ConvNetImpl : torch::nn::Cloneable<ConvNetImpl> {
  nn::Conv2d conv{nullptr};
  nn::BatchNorm2d norm{nullptr};
  nn::Linear head{nullptr};
  ConvNetImpl() { reset(); }
  void reset() override {
    conv = register_module("conv", nn::Conv2d(torch::nn::Conv2dOptions(3, 4, 3).padding(1)));
    norm = register_module("norm", nn::BatchNorm2d(4));
    head = register_module("head", nn::Linear(4 * 8 * 8, 5));
  }
  at::Tensor forward(const at::Tensor& x) { return head(norm(conv(x)).relu_().flatten(1)); }
};
TESSERA_MODULE(ConvNet);

const auto kMutatingStep = [](auto& model, auto& opt, const at::Tensor& x) {
  opt.zero_grad();
  const auto y = model(x);
  const auto positions = torch::arange(y.size(1)).to(y.scalar_type()) / 4;  // a constant
  auto loss = (y.tanh() - positions).pow_(2).mul_(0.5).mean();
  loss.backward();
  opt.step();
  return loss;
};

// All but those of Numerics::Fast: Adam amplifies roundings of a gradient that is zero, that of a bias before batch
// norm.
PassList every_pass() {
  PassList passes;
  for (const auto& pass : compiler::known_passes())
    if (!pass.is_fast_only) passes.emplace_back(pass.name);
  return passes;
}

template <class Model, class MakeOptimizer>
void expect_same_as_eager(Model start, MakeOptimizer make_optimizer, at::IntArrayRef shape) {
  auto eager = clone(start), model = clone(start);
  auto eager_opt = make_optimizer(*eager), opt = make_optimizer(*model);
  auto step = compile(kMutatingStep, {.passes = every_pass(), .codegen = false, .verified = true});
  for (int i = 0; i < 3; i++) {
    const auto x = torch::randn(shape);
    const auto wanted = kMutatingStep(eager, eager_opt, x), found = step(model, opt, x);
    EXPECT_TRUE(at::allclose(found, wanted, 1e-5, 1e-7)) << i;
    for (size_t p = 0; p < eager->parameters().size(); p++) {
      EXPECT_TRUE(at::allclose(model->parameters()[p], eager->parameters()[p], 1e-5, 1e-7)) << i << ", parameter " << p;
      EXPECT_TRUE(at::allclose(model->parameters()[p].grad(), eager->parameters()[p].grad(), 1e-5, 1e-7)) << i;
    }
    for (size_t b = 0; b < eager->buffers().size(); b++)
      EXPECT_TRUE(at::allclose(model->buffers()[b], eager->buffers()[b])) << i << ", buffer " << b;
  }
  EXPECT_EQ(step.report().size(), every_pass().size() + 1) << step.report();  // lower() adds in_place_collectives
  for (const auto* name : {"functionalise", "constant_folding", "batch_dims", "fuse_pointwise"})
    for (const auto& each : step.report())
      if (each.name == name) {
        EXPECT_GT(each.matched.times, 0) << step.report();
      }
}

TEST(AllPasses, Mlp) {
  expect_same_as_eager(
      MLP(models::mlp_module()),
      [](auto& module) { return optim::SGD(module.parameters(), optim::SGD::Options{.lr = 0.1, .momentum = 0.9}); },
      {8, 10});
}

TEST(AllPasses, ConvNet) {
  expect_same_as_eager(ConvNet(), [](auto& module) { return optim::Adam(module.parameters(), {.lr = 0.01}); },
                       {6, 3, 8, 8});
}

TEST(AllPasses, DataParallelOnTwoRanks) {
  const MLP start(models::mlp_module());
  const auto x = torch::randn({2, 8, 10});
  for (const std::string style : {"replicate", "fully_shard"}) {
    auto eager = clone(start);
    optim::SGD eager_opt(eager->parameters(), {.lr = 0.1});
    for (int i = 0; i < 3; i++) kMutatingStep(eager, eager_opt, x.view({16, 10}));
    run_ranks(2, [&](Rank& me) {
      auto model = clone(start);
      optim::SGD opt(model->parameters(), {.lr = 0.1});
      auto step =
          compile(kMutatingStep,
                  {.parallel_mode = DataParallel(style), .passes = every_pass(), .codegen = false, .verified = true});
      for (int i = 0; i < 3; i++) step(model, opt, x[me.rank]);
      for (size_t p = 0; p < eager->parameters().size(); p++)
        EXPECT_TRUE(at::allclose(DTensor(model->parameters()[p]).full_tensor(), eager->parameters()[p], 1e-5, 1e-6))
            << style << ", parameter " << p;
    });
  }
}

}  // namespace
}  // namespace tessera
