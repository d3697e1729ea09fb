// What a call of a compiled step depends on: numbers, captured variables, reasons of recompilations, failures with
// fullgraph = false, and ranks that recompile together. environment_soak_test.cpp draws random cases.
#include "tessera/comm/functional_collectives.h"
#include "tessera/compile/api/compile.h"
#include "tessera/models/mlp.h"
#include "tessera/nn/module_tree.h"
#include "tessera/optim/adam.h"
#include "tessera/optim/sgd.h"
#include "tessera/testing/expect_error.h"
#include "tessera/testing/ranks.h"

#include "captured_warnings.h"
#include "train_step.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <chrono>

namespace tessera {
namespace {

struct SignatureBatch {
  at::Tensor x;
  double gain = 1;
  friend void tessera_visit(SignatureBatch& b, auto&& field) { field(b.x), field(b.gain); }
};

TEST(Signature, HundredValuesOfANumberAreOneProgram) {
  const CompileScope strict({.numerics = Numerics::Strict});  // equal bits
  for (const bool codegen : {false, true}) {
    auto w = torch::randn({3}, torch::requires_grad()), v = w.detach().clone().requires_grad_(true);
    const auto plain = [](at::Tensor& p, const SignatureBatch& batch, double beta, const c10::Scalar& decay) {
      p.mutable_grad().reset();
      auto loss = (batch.x * p).sum() + beta * p.pow(2).sum() + (p * decay).sum() + p.mul(-beta).sum() +
                  (p * batch.gain).tanh().sum();
      loss.backward();
      return loss.detach();
    };
    auto step = compile(plain, {.codegen = codegen});
    for (int i = 0; i < 100; i++) {
      const SignatureBatch batch{torch::full({3}, i * 0.01), 1.0 + i};
      const double beta = 0.5 - 0.01 * i;
      const auto wanted = plain(w, batch, beta, c10::Scalar(0.1 * i)),
                 found = step(v, batch, beta, c10::Scalar(0.1 * i));
      ASSERT_TRUE(at::equal(found, wanted)) << i;
      ASSERT_TRUE(at::equal(v.grad(), w.grad())) << i;
    }
    EXPECT_EQ(step.cache().size(), 1u);
    EXPECT_TRUE(step.recompiles().empty());
  }
}

// Arithmetic, comparisons, sizes and casts on the host make a number a key.
TEST(Signature, NumbersThatTheHostReadsAreKeys) {
  const auto check = [](const char* what, const auto& function) {
    auto step = compile(function, {.codegen = false});
    for (const double number : {0.5, 0.5, 1.5, 2.5, 0.5, -1.5}) {
      const auto x = torch::arange(1, 4, at::kFloat);
      EXPECT_TRUE(at::equal(step(x, number), function(x, number))) << what << " " << number;
    }
    EXPECT_EQ(step.cache().size(), 4u) << what;
  };
  check("arithmetic", [](const at::Tensor& x, double a) { return x * (1 - a); });
  check("comparison", [](const at::Tensor& x, double a) { return a > 1 ? x * 2 : a < 0 ? x * 3 : x; });
  check("equality", [](const at::Tensor& x, double a) { return a == 0.5 ? x * 2 : x + 1; });
  check("absolute value", [](const at::Tensor& x, double a) { return x * std::abs(a); });
  check("cast", [](const at::Tensor& x, double a) { return x * static_cast<float>(a); });
  check("size", [](const at::Tensor& x, double a) { return x.repeat({1 + static_cast<int64_t>(a * a)}).clone(); });
  check("minimum", [](const at::Tensor& x, double a) { return x * std::min(a, 1.0); });
  check("used twice", [](const at::Tensor& x, double a) { return x * a + (a > 1 ? 1 : 0); });
}

// A function object that lists its members: they are inputs and keys, as arguments are.
struct VisitedStep {
  at::Tensor weight;
  double scale = 2;
  std::vector<std::string> names;
  at::Tensor operator()(const at::Tensor& x) const { return x * weight * scale * static_cast<double>(names.size()); }
  friend void tessera_visit(VisitedStep& s, auto&& field) { field(s.weight), field(s.scale), field(s.names); }
};

TEST(Signature, FunctionObjectsThatAreVisited) {
  const VisitedStep plain{torch::randn({3}), 3, {"a", "b"}};
  auto step = compile(plain, {.codegen = false});
  for (int i = 0; i < 5; i++) {
    plain.weight.add_(1);
    const auto x = torch::randn({3});
    EXPECT_TRUE(at::equal(step(x), plain(x)));
  }
  EXPECT_EQ(step.cache().size(), 1u);
  plain.weight.t_();
  plain.weight.unsqueeze_(0);  // another shape of a member recompiles
  EXPECT_TRUE(at::equal(step(torch::ones({3})), plain(torch::ones({3}))));
  EXPECT_EQ(step.cache().size(), 2u);
}

TEST(Signature, RecompilesSayWhy) {
  CapturedWarnings warnings;
  auto step = compile([](const at::Tensor& x, int64_t n) { return x * n; }, {.codegen = false});
  step(torch::ones({2}), 1);
  step(torch::ones({3}), 1);
  step(torch::ones({3}), 2);
  {
    const at::NoGradGuard no_grad;
    step(torch::ones({3}), 2);
  }
  ASSERT_EQ(step.recompiles().size(), 3u);
  EXPECT_EQ(step.recompiles()[0], "tensor argument 0 is f32[3], it was f32[2]");
  EXPECT_EQ(step.recompiles()[1], "in argument 1, an integer, bool or enum has changed from 1 to 2");
  EXPECT_EQ(step.recompiles()[2], "grad mode is off, it was on");
  EXPECT_EQ(warnings.count("is recompiled, because"), 3u);
}

TEST(Signature, RecompilesAreBounded) {
  auto step = compile([](const at::Tensor& x) { return x + 1; }, {.codegen = false, .recompile_limit = 2});
  for (int64_t n = 1; n <= 3; n++) step(torch::ones({n}));
  EXPECT_ERROR(UsageError, step(torch::ones({4})), "recompile_limit", "it was f32[3]");
}

TEST(Signature, StatefulStepsCompileOnce) {
  const auto train = [](auto make) {
    auto start = torch::randn({3});
    auto a = start.clone().requires_grad_(true), b = start.clone().requires_grad_(true);
    auto eager_opt = make(a), opt = make(b);
    const auto body = [](at::Tensor& p, auto& o, const at::Tensor& x) {
      o.zero_grad();
      auto loss = (p * x).relu().sum();
      loss.backward();
      o.step();
      return loss.detach();
    };
    auto step = compile(body, {.codegen = false});
    for (int i = 0; i < 4; i++) {
      const auto x = torch::randn({3});
      EXPECT_TRUE(at::equal(step(b, opt, x), body(a, eager_opt, x)));
      EXPECT_TRUE(at::equal(a, b));
    }
    EXPECT_TRUE(step.recompiles().empty());
  };
  train([](at::Tensor& p) { return optim::AdamW({p}, {.lr = 0.1}); });
  train([](at::Tensor& p) { return optim::Adam({p}, {.lr = 0.1, .fused = true}); });
  train([](at::Tensor& p) { return optim::SGD({p}, {.lr = 0.1, .momentum = 0.9}); });
  train([](at::Tensor& p) { return optim::SGD({p}, {.lr = 0.1, .momentum = 0.9, .fused = true}); });
  for (const bool fused : {false, true})
    train(
        [&](at::Tensor& p) { return optim::SGD({p}, {.lr = 0.1, .momentum = 0.9, .dampening = 0.3, .fused = fused}); });
}

struct PolymorphicLoss {
  double scale = 1;
  virtual ~PolymorphicLoss() = default;
  virtual at::Tensor operator()(const at::Tensor& x) const { return (x * scale).sum(); }
  friend void tessera_visit(PolymorphicLoss& l, auto&& field) { field(l.scale); }
};
struct SquareLoss : PolymorphicLoss {
  at::Tensor operator()(const at::Tensor& x) const override { return (x * x).sum(); }
};

// An object of a derived class behind a reference has functions and members that tessera_visit does not list.
TEST(Signature, DerivedClassesAreRefused) {
  auto step = compile([](const PolymorphicLoss& loss, const at::Tensor& x) { return loss(x); }, {.codegen = false});
  const PolymorphicLoss loss;
  const SquareLoss square;
  const PolymorphicLoss& base = square;
  const auto x = torch::randn({3});
  EXPECT_TRUE(at::equal(step(loss, x), loss(x)));
  EXPECT_TRUE(at::equal(step(square, x), square(x)));
  EXPECT_ERROR(UsageError, step(base, x), "SquareLoss", "derived", "by its own type");
}

struct ReluTag {};
struct TanhTag {};

TEST(Signature, TypesOfArgumentsAreKeys) {
  const auto plain = [](const auto& activation, const at::Tensor& x) {
    return std::is_same_v<std::remove_cvref_t<decltype(activation)>, ReluTag> ? x.relu() : x.tanh();
  };
  auto step = compile(plain, {.codegen = false, .captures = Captures::None});
  const auto x = torch::randn({3});
  for (int call = 0; call < 2; call++) {
    EXPECT_TRUE(at::equal(step(ReluTag(), x), x.relu()));
    EXPECT_TRUE(at::equal(step(TanhTag(), x), x.tanh()));
  }
  EXPECT_EQ(step.cache().size(), 2u);
}

TEST(Signature, EveryDigitOfALongDoubleIsAKey) {
  const auto plain = [](long double k, const at::Tensor& x) { return x * static_cast<double>((k - 1) * 1e18L); };
  auto step = compile(plain, {.codegen = false});
  for (const long double k : {1 + 1e-18L, 1 + 2e-18L, 1 + 1e-18L})
    EXPECT_TRUE(at::equal(step(k, torch::ones({3})), plain(k, torch::ones({3}))));
}

TEST(Captures, AChangedVariableIsAnError) {
  double beta = 0.5;
  auto step = compile([&](const at::Tensor& x) { return (x + 1) * beta; }, {.codegen = false});
  step(torch::ones({2}));
  step(torch::ones({2}));  // is checked
  beta = 0.75;
  step(torch::ones({2}));  // is not checked
  EXPECT_ERROR(UsageError, step(torch::ones({2})), "has changed since the step was traced", "op 1", "aten.mul", "0.75",
               "0.5", "ts::live");
}

// A module of a holder of LibTorch cannot be seen from outside of its forward.
TEST(Captures, TrainingModeOfAPlainCapturedModule) {
  torch::nn::Dropout drop(0.5);
  auto step = compile([&](const at::Tensor& x) { return drop(x); }, {.codegen = false});
  for (int i = 0; i < 3; i++) step(torch::ones({2}));
  drop->eval();
  EXPECT_ERROR(UsageError, step(torch::ones({2})), "has changed since the step was traced");
}

TEST(Captures, CheckOption) {
  double beta = 0.5;
  auto step = compile([&](const at::Tensor& x) { return x * beta; }, {.codegen = false, .check = 8});
  step(torch::ones({2}));
  step(torch::ones({2}));
  beta = 0.75;
  EXPECT_ERROR(UsageError, step(torch::ones({2})), "has changed since the step was traced");
}

TEST(Captures, NoneEndsTheChecks) {
  int runs = 0;
  auto step = compile(
      [&](const at::Tensor& x) {
        runs++;
        return x * 2;
      },
      {.codegen = false, .captures = Captures::None});
  step(torch::ones({2}));
  const int traces = runs;
  for (int i = 0; i < 8; i++) step(torch::ones({2}));
  EXPECT_EQ(runs, traces);
}

TEST(Captures, LiveVariablesAreRead) {
  double beta = 0.5;
  int64_t power = 2;
  std::string reduction = "sum";
  auto offset = torch::ones({2});
  auto step = compile(
      [beta = live(beta), power = live(power), reduction = live(reduction),
       offset = live(offset)](const at::Tensor& x) {
        auto y = x.pow(power.value()) * beta.value() + offset.value();
        return reduction.value() == "sum" ? y.sum() : y.mean();
      },
      {.codegen = false});
  const auto expect = [&](const at::Tensor& x) {
    auto y = x.pow(power) * beta + offset;
    EXPECT_TRUE(at::equal(step(x), reduction == "sum" ? y.sum() : y.mean()));
  };
  const auto x = torch::randn({2});
  for (int i = 0; i < 20; i++) {
    beta = i * 0.1;
    expect(x);
  }
  EXPECT_EQ(step.cache().size(), 1u);
  power = 3, expect(x);
  reduction = "mean", expect(x);
  offset = torch::randn({2}), expect(x);
  EXPECT_EQ(step.cache().size(), 4u);
}

struct UnlistedBatch {
  at::Tensor x;
  double gain = 1;
  friend void tessera_visit(UnlistedBatch& b, auto&& field) { field(b.x); }
};

TEST(Signature, MembersThatAreNotListedAreRefused) {
  auto step = compile([](const UnlistedBatch& b) { return b.x * b.gain; }, {.codegen = false});
  EXPECT_ERROR(UsageError, step(UnlistedBatch{torch::ones({2})}), "lists 1 of its 2 members");
}

// A failure in tracing, in a pass and in replay: the step runs in eager mode, from the state before the call.
TEST(Fallback, EveryFailureFallsBackToEager) {
  const auto body = [](at::Tensor& p, const at::Tensor& x) {
    const at::NoGradGuard no_grad;
    p.mul_(2);
    return (p * x).sum();
  };
  const auto expect_eager = [&](auto step, const char* reason) {
    CapturedWarnings warnings;
    auto p = torch::ones({2}), x = torch::randn({2});
    for (int i = 0; i < 3; i++) {
      auto copy = p.clone();
      const auto wanted = body(copy, x);
      EXPECT_TRUE(at::equal(step(p, x), wanted)) << reason;
      EXPECT_TRUE(at::equal(p, copy)) << reason;
    }
    EXPECT_EQ(warnings.count("falls back to eager"), 1u) << reason;
    EXPECT_EQ(warnings.count(reason), 1u);
  };
  const auto fail = [](compiler::Program&) -> compiler::Matched { throw std::runtime_error("this pass fails"); };
  expect_eager(
      compile(body, {.passes = PassList{compiler::Pass{"failing", fail}}, .codegen = false, .fullgraph = false}),
      "this pass fails");
  const compiler::MakeRunner runner = [](const compiler::Program&) {
    return [](const Tensors& inputs) -> Tensors {
      inputs[0].zero_();  // which the step writes
      throw std::runtime_error("this run fails");
    };
  };
  expect_eager(compile(body, {.codegen = false, .fullgraph = false, .run_with = runner}), "this run fails");
  int calls = 0;
  expect_eager(compile(
                   [&calls, body](at::Tensor& p, const at::Tensor& x) {
                     auto y = body(p, x);
                     if (compiling()) throw std::out_of_range("only while tracing");
                     calls++;
                     return y;
                   },
                   {.codegen = false, .fullgraph = false}),
               "only while tracing");
  EXPECT_EQ(calls, 3);
}

// A leaf that the step captures has its gradient back after a trace that fails.
TEST(Fallback, GradientsOfCapturedLeavesAreRestored) {
  auto w = torch::ones({2}, torch::requires_grad());
  w.mutable_grad() = torch::full({2}, 5.0);
  auto step = compile([&](const at::Tensor& x) {
    auto loss = (w * x).sum();
    loss.backward();
    return loss.item<double>() > 0 ? x : -x;
  });
  EXPECT_ERROR(UsageError, step(torch::ones({2})), "depends on values");
  EXPECT_TRUE(at::equal(w.grad(), torch::full({2}, 5.0)));
}

// The sum of n x over the ranks. Another n recompiles it.
auto sum_times_n(const testing::Rank& me) {
  return [group = me.group()](const at::Tensor& x, int64_t n) {
    const auto y = funcol::all_reduce(x * n, ReduceOp::Sum, group);
    funcol::wait(y, group);
    return y;
  };
}

TEST(Ranks, OneThatRecompilesAloneEndsAll) {
  using Clock = std::chrono::steady_clock;
  testing::run_ranks(2, [](testing::Rank& me) {
    auto step = compile(sum_times_n(me), {.codegen = false, .captures = Captures::None});
    for (int64_t n = 1; n <= 2; n++) step(torch::ones({4}), n);  // all ranks recompile together
    const auto begin = Clock::now();
    EXPECT_ERROR(UsageError, step(torch::ones({4}), int64_t{me.rank == 1 ? 3 : 2}), "rank 1 recompiles its step",
                 "changed from 2 to 3");
    EXPECT_LT(Clock::now() - begin, std::chrono::seconds(5));
  });
}

TEST(Ranks, AgreeOnEveryCall) {
  testing::run_ranks(2, [](testing::Rank& me) {
    auto step = compile(sum_times_n(me), {.codegen = false, .captures = Captures::None, .agree = Agree::EveryCall});
    for (const int64_t n : {2, 2, 3, 3}) {
      const auto own = me.rank == 1 ? n : 2;
      EXPECT_TRUE(at::equal(step(torch::ones({4}), own), torch::full({4}, 2.0 + static_cast<double>(n))));
    }
    EXPECT_EQ(step.recompiles().size(), 1u);
  });
}

}  // namespace
}  // namespace tessera
