// How a function is compiled: passes with settings, passes that match nothing, order left alone, another runner.
#include "tessera/compile/api/options.h"

#include "tessera/comm/functional_collectives.h"
#include "tessera/compile/api/compile.h"
#include "tessera/compile/api/compile_backward.h"
#include "tessera/compile/detail/replay/interpret.h"
#include "tessera/models/mlp.h"
#include "tessera/nn/module_tree.h"
#include "tessera/testing/expect_error.h"
#include "tessera/testing/ranks.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

namespace tessera {
namespace {

using models::MLP;
using testing::Rank;
using testing::run_ranks;

// Keeps what is warned of while it is alive, on this thread.
class Warnings final : public c10::WarningHandler {
 public:
  void process(const c10::Warning& warning) override { said.push_back(warning.msg()); }
  std::vector<std::string> said;

 private:
  c10::WarningUtils::WarningHandlerGuard guard_{this};
};

TEST(PassNames, MayCarrySettings) {
  EXPECT_EQ(compiler::find_pass("fold_views").name, "fold_views");
  EXPECT_EQ(compiler::find_pass("fold_views()").name, "fold_views()");
  EXPECT_ERROR(UsageError, compiler::find_pass("fold_view"), "no pass is called fold_view;", "fold_views");
  EXPECT_ERROR(UsageError, compiler::find_pass("fold_views(much=3)"), "no setting \"much\"", "it has no settings");
  EXPECT_ERROR(UsageError, compiler::find_pass("fold_views(much=3"), "closing bracket");
}

at::Tensor twice(const at::Tensor& x) { return x.relu() * x.relu(); }

TEST(IdlePasses, AreSaidOnceForEachFunction) {
  for (int i = 0; i < 2; i++) {
    Warnings warnings;
    auto step = compile(twice, {.passes = PassList{"common_subexpressions", "schedule_comm_wait"}});
    step(torch::ones({3}));
    step(torch::ones({4}));  // compiled again
    std::erase_if(warnings.said, [](const auto& said) { return said.find("matched nothing") == std::string::npos; });
    ASSERT_EQ(warnings.said.size(), 1u);
    EXPECT_NE(warnings.said[0].find("schedule_comm_wait"), std::string::npos);
    const auto report = c10::str(step.report());
    EXPECT_NE(report.find("common_subexpressions: 1 in "), std::string::npos) << report;
    EXPECT_NE(report.find("schedule_comm_wait: 0 in "), std::string::npos) << report;
    EXPECT_NE(report.find("fuse_pointwise: 1 in "), std::string::npos) << report;
  }
  Warnings warnings;
  compile(twice)(torch::ones({3}));
  EXPECT_TRUE(warnings.said.empty());
}

TEST(IdlePasses, AreErrorsWhereAsked) {
  auto step = compile(twice, {.passes = PassList{"schedule_comm_wait"}, .fullgraph = false, .strict_passes = true});
  EXPECT_ERROR(UsageError, step(torch::ones({3})), "schedule_comm_wait", "matched nothing");
  auto other = compile(twice, {.passes = PassList{"common_subexpressions"}, .strict_passes = true});
  EXPECT_TRUE(at::equal(other(torch::ones({3})), torch::ones({3})));
}

TEST(Reorder, OffLeavesCommunicationWhereItWas) {
  run_ranks(2, [](Rank& me) {
    const auto& group = me.world.group();
    for (const bool reorder : {true, false}) {
      auto step = compile(
          [&](const at::Tensor& x) {
            const auto sum = comm::all_reduce(x, ReduceOp::Sum, group);
            comm::wait(sum, group);
            return sum + x.tanh().exp();
          },
          {.codegen = false, .reorder = reorder});
      step(torch::ones({3}));
      const auto listing = step.listing();
      EXPECT_EQ(listing.find("wait_tensor") > listing.find("exp"), reorder) << listing;
    }
  });
}

TEST(CompileBackward, ByAnotherRunner) {
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
    for (size_t p = 0; p < eager->parameters().size(); p++)
      EXPECT_TRUE(at::equal(model->parameters()[p].grad(), eager->parameters()[p].grad())) << i;
  }
  reset_compile_caches();
}

TEST(CompileBackward, ARunnerThatGivesTooLittle) {
  MLP model(models::mlp_module());
  const auto loss = model(torch::ones({8, 10})).sum();
  auto scope = compile_backward([](const compiler::Program&) { return [](const Tensors&) { return Tensors(); }; });
  EXPECT_ERROR(UsageError, loss.backward(), "gave 0 outputs");
  reset_compile_caches();
}

}  // namespace
}  // namespace tessera
