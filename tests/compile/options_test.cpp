// CompileOptions: passes with settings, passes that match nothing, reorder, custom runners.
#include "tessera/compile/api/options.h"

#include "tessera/comm/functional_collectives.h"
#include "tessera/compile/api/compile.h"
#include "tessera/compile/api/compile_backward.h"
#include "tessera/compile/detail/replay/interpret.h"
#include "tessera/models/mlp.h"
#include "tessera/nn/module_tree.h"
#include "tessera/testing/expect_error.h"
#include "tessera/testing/ranks.h"

#include "captured_warnings.h"
#include "train_step.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

namespace tessera {
namespace {

using models::MLP;
using testing::Rank;
using testing::run_ranks;

TEST(PassNames, CanHaveSettings) {
  EXPECT_EQ(compiler::find_pass("fold_views").name, "fold_views");
  EXPECT_EQ(compiler::find_pass("fold_views()").name, "fold_views()");
  EXPECT_ERROR(UsageError, compiler::find_pass("fold_view"), "no pass is called fold_view;", "fold_views");
  EXPECT_ERROR(UsageError, compiler::find_pass("fold_views(much=3)"), "unknown setting \"much\"", "it has no settings");
  EXPECT_ERROR(UsageError, compiler::find_pass("fold_views(much=3"), "closing bracket");
}

at::Tensor relu_squared(const at::Tensor& x) { return x.relu() * x.relu(); }

TEST(UnmatchedPasses, WarnOncePerFunction) {
  for (int i = 0; i < 2; i++) {
    CapturedWarnings warnings;
    auto step = compile(relu_squared, {.passes = PassList{"common_subexpressions", "schedule_comm_wait"}});
    step(torch::ones({3}));
    step(torch::ones({4}));  // recompiles
    EXPECT_EQ(warnings.count("matched nothing"), 1u);
    EXPECT_EQ(warnings.count("matched nothing: schedule_comm_wait"), 1u);
    const auto report = c10::str(step.report());
    EXPECT_NE(report.find("common_subexpressions: 1 in "), std::string::npos) << report;
    EXPECT_NE(report.find("schedule_comm_wait: 0 in "), std::string::npos) << report;
    EXPECT_NE(report.find("fuse_pointwise: 1 in "), std::string::npos) << report;
  }
  CapturedWarnings warnings;
  compile(relu_squared)(torch::ones({3}));
  EXPECT_TRUE(warnings.messages.empty());
}

TEST(UnmatchedPasses, AreErrorsWithStrictPasses) {
  auto step =
      compile(relu_squared, {.passes = PassList{"schedule_comm_wait"}, .fullgraph = false, .strict_passes = true});
  EXPECT_ERROR(UsageError, step(torch::ones({3})), "schedule_comm_wait", "matched nothing");
  auto other = compile(relu_squared, {.passes = PassList{"common_subexpressions"}, .strict_passes = true});
  EXPECT_TRUE(at::equal(other(torch::ones({3})), torch::ones({3})));
}

TEST(Reorder, FalseKeepsTheOrderOfCommunication) {
  run_ranks(2, [](Rank& me) {
    const auto& group = me.world.group();
    for (const bool reorder : {true, false}) {
      auto step = compile(
          [&](const at::Tensor& x) {
            const auto sum = funcol::all_reduce(x, ReduceOp::Sum, group);
            funcol::wait(sum, group);
            return sum + x.tanh().exp();
          },
          {.codegen = false, .reorder = reorder});
      step(torch::ones({3}));
      const auto listing = step.listing();
      EXPECT_EQ(listing.find("wait_tensor") > listing.find("exp"), reorder) << listing;
    }
  });
}

TEST(CompileBackward, CustomRunner) {
  const MLP start(models::mlp_module());
  auto eager = clone(start), model = clone(start);
  int made = 0, calls = 0;
  for (int i = 0; i < 3; i++) {
    const auto x = torch::ones({8, 10}) * (i + 1);
    eager(x).pow(2).sum().backward();
    const auto loss = model(x).pow(2).sum();
    auto scope = compile_backward([&](const compiler::Program& program) {
      made++;
      return [&calls, program](const Tensors& inputs) {
        calls++;
        return compiler::interpret(program, inputs);
      };
    });
    loss.backward();
    EXPECT_EQ(made, i + 1);
    EXPECT_EQ(calls, i + 1);
    EXPECT_EQ(scope.programs().at(0)->runs(), 1);
    expect_equal_bits(*model, *eager);
  }
  reset_compile_caches();
}

TEST(CompileBackward, RunnerWithTooFewOutputs) {
  MLP model(models::mlp_module());
  const auto loss = model(torch::ones({8, 10})).sum();
  auto scope = compile_backward([](const compiler::Program&) { return [](const Tensors&) { return Tensors(); }; });
  EXPECT_ERROR(UsageError, loss.backward(), "returned 0 outputs");
  reset_compile_caches();
}

}  // namespace
}  // namespace tessera
