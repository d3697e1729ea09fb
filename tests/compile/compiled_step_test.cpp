#include "tessera/compile/api/compile.h"

#include "tessera/models/mlp.h"
#include "tessera/nn/module_tree.h"
#include "tessera/optim/adam.h"
#include "tessera/optim/clip_grad.h"
#include "tessera/optim/sgd.h"

#include "train_step.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

namespace tessera {
namespace {

using models::MLP;

TEST(Compile, StepEqualsEager) {
  const CompileScope strict({.numerics = Numerics::Strict});  // equal bits
  const MLP start(models::mlp_module());
  for (const bool warm : {true, false}) {
    auto eager = clone(start), model = clone(start);
    optim::AdamW eager_opt(eager->parameters(), {.lr = 0.01, .fused = true}),
        opt(model->parameters(), {.lr = 0.01, .fused = true});
    auto step = compile(train_step);
    const auto x = torch::randn({8, 10});
    if (warm) {
      train_step(eager, eager_opt, x);
      train_step(model, opt, x);
    }
    for (int i = 0; i < 4; i++) {
      const auto y = torch::randn({8, 10});
      const auto wanted = train_step(eager, eager_opt, y);
      const auto found = step(model, opt, y);
      EXPECT_TRUE(at::equal(found, wanted)) << i;
      EXPECT_FALSE(found.requires_grad());
      expect_equal_bits(*model, *eager);
    }
    EXPECT_EQ(step.cache().size(), 1u);
  }
}

// Trains two copies of a model alternately, one with eager_of(model) and one with compiled_of(model). Losses,
// parameters and gradients must be bitwise equal.
template <class Eager, class Compiled>
void expect_same_training(const MLP& start, int calls, const Eager& eager_of, const Compiled& compiled_of) {
  auto eager = clone(start), model = clone(start);
  auto eager_step = eager_of(eager);
  auto step = compiled_of(model);
  for (int i = 0; i < calls; i++) {
    const auto x = torch::randn({8, 10});
    const auto wanted = eager_step(x, i), found = step(x, i);
    ASSERT_TRUE(at::equal(found, wanted)) << "call " << i;
    expect_equal_bits(*model, *eager);
    ASSERT_FALSE(::testing::Test::HasFailure()) << "call " << i;
  }
}

// The lambda captures model and optimizer instead of taking arguments. Gradients are set to none, set to zero, or
// accumulate.
TEST(Compile, CapturedModelsAndOptimizers) {
  const CompileScope strict({.numerics = Numerics::Strict});  // equal bits
  enum class OldGradients { SetToNone, SetToZero, Kept };
  for (const auto old : {OldGradients::SetToNone, OldGradients::SetToZero, OldGradients::Kept}) {
    SCOPED_TRACE(static_cast<int>(old));
    const auto make = [&](const bool compiled) {
      return [=](MLP& model) {
        auto opt = std::make_shared<optim::AdamW>(model->parameters(), optim::AdamW::Options{.lr = 0.01});
        const auto run = [=](const at::Tensor& x) mutable {
          if (old != OldGradients::Kept) opt->zero_grad(old == OldGradients::SetToNone);
          auto loss = model(x).pow(2).mean();
          loss.backward();
          opt->step();
          return loss.detach();
        };
        std::function<at::Tensor(const at::Tensor&)> step = run;
        if (compiled) step = compile(run);
        return [=](const at::Tensor& x, int) { return step(x); };
      };
    };
    expect_same_training(MLP(models::mlp_module()), 5, make(false), make(true));
  }
}

TEST(Compile, LearningRatesAreReadOnEveryCall) {
  const CompileScope strict({.numerics = Numerics::Strict});  // equal bits
  const auto make = [](const bool compiled) {
    return [=](MLP& model) {
      auto opt = std::make_shared<optim::SGD>(model->parameters(), optim::SGD::Options{.lr = 0.1, .momentum = 0.9});
      auto step = std::make_shared<decltype(compile(train_step))>(compile(train_step));
      return [=](const at::Tensor& x, int call) mutable {
        opt->set_lr(0, 0.1 / (call + 1));
        auto loss = compiled ? (*step)(model, *opt, x) : train_step(model, *opt, x).detach();
        if (compiled && call > 1) {
          EXPECT_EQ(step->cache().size(), 1u);
        }
        return loss;
      };
    };
  };
  expect_same_training(MLP(models::mlp_module()), 5, make(false), make(true));
}

TEST(Compile, GradientAccumulationAndClipping) {
  const CompileScope strict({.numerics = Numerics::Strict});  // equal bits
  const auto accumulate = [](auto& model, auto& opt, const at::Tensor& x) {
    opt.zero_grad();
    at::Tensor total;
    for (const auto& part : x.chunk(4)) {
      auto loss = model(part).pow(2).mean() / 4;
      loss.backward();
      total = total.defined() ? total + loss.detach() : loss.detach();
    }
    optim::clip_grad_norm_(model->parameters(), 0.01);
    opt.step();
    return total;
  };
  const auto make = [&](const bool compiled) {
    return [=](MLP& model) {
      auto opt = std::make_shared<optim::AdamW>(model->parameters(), optim::AdamW::Options{.lr = 0.01, .fused = true});
      auto step = std::make_shared<decltype(compile(accumulate))>(compile(accumulate));
      return [=](const at::Tensor& x, int) mutable {
        return compiled ? (*step)(model, *opt, x) : accumulate(model, *opt, x);
      };
    };
  };
  expect_same_training(MLP(models::mlp_module()), 4, make(false), make(true));
}

TEST(Compile, NewShapesRecompileAndTheCacheIsBounded) {
  MLP model(models::mlp_module());
  auto eager = clone(model);
  auto step = compile([](auto& m, const at::Tensor& x) { return m(x).sum(); }, {.cache_size = 3});
  for (int64_t rows = 1; rows <= 6; rows++) {
    const auto x = torch::randn({rows, 10});
    EXPECT_TRUE(at::equal(step(model, x), eager(x).sum().detach())) << rows;
    EXPECT_EQ(step.cache().size(), std::min<int64_t>(rows, 3));
  }
  model->eval();
  step(model, torch::randn({6, 10}));
  EXPECT_EQ(step.cache().size(), 3);
}

TEST(Compile, RandomNumbersContinueTheStream) {
  auto step = compile([](const at::Tensor& x) { return torch::dropout(x, 0.5, true); });
  const auto x = torch::ones({64});
  torch::manual_seed(3);
  std::vector<at::Tensor> wanted;
  for (int i = 0; i < 3; i++) wanted.push_back(torch::dropout(x, 0.5, true));
  torch::manual_seed(3);
  for (int i = 0; i < 3; i++) EXPECT_TRUE(at::equal(step(x), wanted[static_cast<size_t>(i)])) << i;
}

// The program reuses the memory of gradients, but not if the user still references one.
TEST(Compile, ReferencedGradientKeepsItsValues) {
  MLP model(models::mlp_module());
  optim::SGD opt(model->parameters(), {.lr = 0.1});
  auto step = compile(train_step);
  step(model, opt, torch::randn({8, 10}));
  const auto held = model->parameters()[0].grad();
  const auto part_of_other = model->parameters()[1].grad().narrow(0, 0, 2);
  const auto before = held.clone(), part_before = part_of_other.clone();
  step(model, opt, torch::randn({8, 10}));
  EXPECT_TRUE(at::equal(held, before));
  EXPECT_TRUE(at::equal(part_of_other, part_before));
  EXPECT_FALSE(at::equal(model->parameters()[0].grad(), before));
}

// The argument aliases a parameter of the model in every second call.
TEST(Compile, ArgumentThatAliasesAParameter) {
  MLP model(models::mlp_module());
  auto step = compile([](auto& m, const at::Tensor& x) {
    const at::NoGradGuard no_grad;
    m->parameters()[1].add_(1);
    return x.sum();
  });
  const auto other = torch::randn({16});
  for (const auto& x : {other, model->parameters()[1].detach(), other, model->parameters()[1].detach()}) {
    auto copy = clone(model);
    const auto wanted = x.is_same(other) ? x.sum() : (x + 1).sum();
    EXPECT_TRUE(at::equal(step(model, x), wanted));
  }
}

}  // namespace
}  // namespace tessera
