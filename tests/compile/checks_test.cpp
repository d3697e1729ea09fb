// Checks of compiled steps against eager mode: programs that differ, numbers in results, and ranks of which one fails.
#include "tessera/comm/functional_collectives.h"
#include "tessera/compile/api/compile.h"
#include "tessera/nn/modules.h"
#include "tessera/optim/sgd.h"
#include "tessera/testing/expect_error.h"
#include "tessera/testing/ranks.h"

#include "captured_warnings.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <chrono>

namespace tessera {
namespace {

// A pass that makes a wrong program: it replaces one op by another.
PassChoice replace_op(const char* from, const char* to) {
  return compiler::Pass{"wrong", [from, to](compiler::Program& program) {
                          compiler::Matched matched;
                          for (auto& node : program.nodes)
                            if (node.name() == from) node.op = compiler::find_op(to), matched.times++;
                          return matched;
                        }};
}

struct CheckedState {
  at::Tensor weight = torch::ones({3}, torch::requires_grad());
  at::Tensor sum = torch::zeros({});
  optim::SGD optimizer{{weight}, {.lr = 0.1, .momentum = 0.9}};
};

// The check runs the step in eager mode and compiled from one state, and compares results, gradients and memory.
TEST(Checks, AWrongProgramIsAnError) {
  struct Case {
    const char *from, *to, *what;
  };
  const Case cases[] = {{"aten.exp", "aten.neg", "result 0"},
                        {"aten.tanh_backward", "aten.sigmoid_backward", "gradient of"},
                        {"aten.cos", "aten.sin", "captured"}};
  for (const auto& [from, to, what] : cases) {
    CheckedState s, eager;
    const auto body = [](CheckedState& state, const at::Tensor& x) {
      state.optimizer.zero_grad();
      auto loss = (x * state.weight).tanh().sum();
      loss.backward();
      const at::NoGradGuard no_grad;
      state.sum.add_(x.sum().cos());
      state.optimizer.step();
      return x.exp();
    };
    auto step = compile([&](const at::Tensor& x) { return body(s, x); },
                        {.passes = PassList{replace_op(from, to)}, .codegen = false});
    const auto x = torch::rand({3});
    EXPECT_ERROR(UsageError, step(x), "differs from eager mode", what, from == std::string("aten.exp") ? "neg" : "");
    body(eager, x);  // the state is that of the eager step, complete
    EXPECT_TRUE(at::equal(s.weight, eager.weight)) << what;
    EXPECT_TRUE(at::equal(s.weight.grad(), eager.weight.grad())) << what;
    EXPECT_TRUE(at::equal(s.sum, eager.sum)) << what;
  }
}

// Checks change nothing: state, random numbers and host state advance once per call.
TEST(Checks, ACheckedCallIsOneCall) {
  const auto train = [](bool compiled) {
    torch::manual_seed(3);
    CheckedState s;
    nn::Dropout drop(0.5);
    auto generator = at::detail::createCPUGenerator(7);
    const auto body = [&](const at::Tensor& x) {
      s.optimizer.zero_grad();
      auto loss = (drop(x * s.weight) * torch::rand({3}, generator)).pow(2).sum();
      loss.backward();
      s.optimizer.step();
      const at::NoGradGuard no_grad;
      s.sum.add_(loss);
      return loss;
    };
    auto step = compile(body, {.codegen = false, .check = 5});
    Tensors all;
    for (int i = 0; i < 9; i++) {
      const auto x = torch::randn({3});
      auto loss = compiled ? step(x) : body(x).detach();
      EXPECT_FALSE(loss.requires_grad() && compiled);
      all.insert(all.end(), {loss, s.weight.detach().clone(), s.weight.grad().clone(), s.sum.clone(), torch::rand({})});
    }
    EXPECT_TRUE(step.recompiles().empty());
    return all;
  };
  const auto wanted = train(false), found = train(true);
  for (size_t i = 0; i < wanted.size(); i++) EXPECT_TRUE(at::equal(found[i], wanted[i])) << i;
}

struct LossAndNumbers {
  at::Tensor loss;
  double beta = 0, negative = 0;
  int64_t rows = 0;
  c10::Scalar scalar;
  std::string name;
  friend void tessera_visit(LossAndNumbers& r, auto&& field) {
    field(r.loss), field(r.beta), field(r.negative), field(r.rows), field(r.scalar), field(r.name);
  }
};

TEST(NumbersInResults, AreThoseOfTheCall) {
  const auto body = [](const at::Tensor& x, double beta, const c10::Scalar& s, const std::string& name) {
    return LossAndNumbers{x.sum() * beta, beta, -beta, x.size(0), s, name};
  };
  auto step = compile(body, {.codegen = false});
  for (const int64_t rows : {2, 2, 3})
    for (const double beta : {0.5, 1.5, 2.5}) {
      const auto name = beta > 2 ? "large" : "small";
      const auto x = torch::randn({rows});
      const auto wanted = body(x, beta, beta + 1, name), found = step(x, beta, c10::Scalar(beta + 1), name);
      EXPECT_TRUE(at::equal(found.loss, wanted.loss));
      EXPECT_EQ(found.beta, beta);
      EXPECT_EQ(found.negative, -beta);
      EXPECT_EQ(found.rows, rows);
      EXPECT_EQ(found.scalar.toDouble(), beta + 1);
      EXPECT_EQ(found.name, name);
    }
  EXPECT_EQ(step.cache().size(), 6u);  // three values of the Scalar, which is read on the host, and two shapes
}

TEST(NumbersInResults, OfTheHostAreRefusedOrChecked) {
  int calls = 0;
  auto counts = compile([&](const at::Tensor& x) { return std::tuple(x * 2, ++calls); }, {.codegen = false});
  EXPECT_ERROR(UsageError, counts(torch::ones({2})), "two runs of the step", "return");
  double rate = 0.5;
  auto reads = compile([&](const at::Tensor& x) { return std::tuple(x * 2, rate); }, {.codegen = false});
  for (int i = 0; i < 3; i++) reads(torch::ones({2}));
  rate = 0.75;
  EXPECT_ERROR(UsageError, reads(torch::ones({2})), "has changed since", "0.75", "0.5");
}

using CheckClock = std::chrono::steady_clock;

// Twice the sum of x over the ranks. Rank 1 cannot compile it.
auto sum_that_rank_1_refuses(const testing::Rank& me) {
  return [group = me.group(), rank = me.rank](const at::Tensor& x) {
    if (rank == 1 && compiling()) TORCH_CHECK(false, "not on this rank");
    auto y = funcol::all_reduce(x * 2, ReduceOp::Sum, group);
    funcol::wait(y, group);
    return y;
  };
}

TEST(Ranks, OneThatFallsBackMakesAllFallBack) {
  testing::run_ranks(2, [](testing::Rank& me) {
    for (const auto agree : {Agree::OnError, Agree::EveryCall}) {
      CapturedWarnings warnings;
      auto step = compile(sum_that_rank_1_refuses(me),
                          {.codegen = false, .fullgraph = false, .captures = Captures::None, .agree = agree});
      const auto begin = CheckClock::now();
      for (int64_t n = 1; n <= 4; n++)  // another shape is another attempt
        EXPECT_TRUE(at::equal(step(torch::ones({(n + 1) / 2})), torch::full({(n + 1) / 2}, 4.0)));
      EXPECT_LT(CheckClock::now() - begin, std::chrono::seconds(10));
      EXPECT_EQ(step.cache().size(), 0u);
      EXPECT_GE(warnings.count("falls back to eager"), 1u);
      EXPECT_GE(warnings.count("not on this rank"), 1u);
      EXPECT_GE(warnings.count(me.rank == 0 ? "rank 1" : "not on"), 1u);
    }
  });
}

TEST(Ranks, OneThatCannotCompileEndsAll) {
  testing::run_ranks(2, [](testing::Rank& me) {
    auto step = compile(sum_that_rank_1_refuses(me), {.codegen = false, .captures = Captures::None});
    const auto begin = CheckClock::now();
    EXPECT_ERROR(c10::Error, step(torch::ones({2})), "not on this rank", me.rank == 0 ? "rank 1" : "");
    EXPECT_LT(CheckClock::now() - begin, std::chrono::seconds(5));
  });
}

// A run that fails after its peers have begun cannot fall back alone: their collectives would meet.
TEST(Ranks, OneWhoseRunFailsEndsAll) {
  testing::run_ranks(2, [](testing::Rank& me) {
    const auto group = me.group();
    auto step = compile(
        [group](const at::Tensor& x, const at::Tensor& y) {
          auto sum = funcol::all_reduce(x * 2, ReduceOp::Sum, group);
          funcol::wait(sum, group);
          auto other = torch::equal(x, y) ? sum + 1 : sum;  // the program checks that the answer is the same
          other = funcol::all_reduce(other, ReduceOp::Sum, group);
          funcol::wait(other, group);
          return other;
        },
        {.codegen = false, .fullgraph = false, .captures = Captures::None});
    step(torch::ones({2}), torch::ones({2}));
    const auto begin = CheckClock::now();
    EXPECT_ERROR(UsageError, step(torch::ones({2}), torch::full({2}, me.rank == 1 ? 2.0 : 1.0)), "rank 1",
                 "torch::equal()");
    EXPECT_LT(CheckClock::now() - begin, std::chrono::seconds(5));
  });
}

TEST(Ranks, OneWhoseCapturedVariableChangesEndsAll) {
  testing::run_ranks(2, [](testing::Rank& me) {
    const auto group = me.group();
    double beta = 0.5;
    auto step = compile(
        [group, &beta](const at::Tensor& x) {
          auto y = funcol::all_reduce(x * beta, ReduceOp::Sum, group);
          funcol::wait(y, group);
          return y;
        },
        {.codegen = false});
    for (int i = 0; i < 3; i++) EXPECT_TRUE(at::equal(step(torch::ones({2})), torch::full({2}, 1.0)));
    if (me.rank == 1) beta = 0.75;
    const auto begin = CheckClock::now();
    EXPECT_ERROR(UsageError, step(torch::ones({2})), "rank 1", "has changed since the step was traced");
    EXPECT_LT(CheckClock::now() - begin, std::chrono::seconds(5));
  });
}

}  // namespace
}  // namespace tessera
