// Errors of compile(): the message, and that the state of model and optimizer is restored.
#include "tessera/comm/functional_collectives.h"
#include "tessera/compile/api/compile.h"
#include "tessera/models/mlp.h"
#include "tessera/nn/module_tree.h"
#include "tessera/optim/sgd.h"
#include "tessera/testing/expect_error.h"
#include "tessera/testing/ranks.h"

#include "train_step.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

namespace tessera {
namespace {

using models::MLP;
using testing::Rank;
using testing::run_ranks;

TEST(CompileErrors, StepThatReadsAValueOnTheHost) {
  MLP model(models::mlp_module());
  const auto before = model->parameters()[0].detach().clone();
  auto step = compile([](auto& m, const at::Tensor& x) {
    const at::NoGradGuard no_grad;
    m->parameters()[0].mul_(2);
    return m(x) * m(x).sum().template item<double>();
  });
  EXPECT_ERROR(UsageError, step(model, torch::randn({8, 10})), "_local_scalar_dense", "depends on values");
  EXPECT_TRUE(at::equal(model->parameters()[0], before));
}

TEST(CompileErrors, WithoutFullgraphItFallsBackToEager) {
  MLP model(models::mlp_module());
  auto step = compile(
      [](auto& m, const at::Tensor& x) {
        const at::NoGradGuard no_grad;
        m->parameters()[0].mul_(2);
        return m(x) * m(x).sum().template item<double>();
      },
      {.fullgraph = false});
  const auto x = torch::randn({8, 10});
  for (int i = 0; i < 2; i++) {
    const auto before = model->parameters()[0].detach().clone();
    const auto found = step(model, x);
    EXPECT_TRUE(at::equal(model->parameters()[0], before * 2));  // the failed trace is undone
    EXPECT_TRUE(at::equal(found, model(x).detach() * model(x).sum().item<double>()));
  }
  EXPECT_EQ(step.cache().size(), 0u);
}

// The trace has set gradients; they are restored although compilation fails after it.
TEST(CompileErrors, ErrorInAPassRestoresGradients) {
  MLP model(models::mlp_module());
  optim::SGD opt(model->parameters(), {.lr = 0.1});
  const auto fail = [](compiler::Program&) -> compiler::Matched { TESSERA_FAIL(UsageError, "this pass fails"); };
  auto step = compile(train_step, {.passes = PassList{compiler::Pass{"failing", fail}}});
  EXPECT_ERROR(UsageError, step(model, opt, torch::randn({8, 10})), "this pass fails");
  for (const auto& p : model->parameters()) EXPECT_FALSE(p.grad().defined());
}

TEST(CompileErrors, MutationOfAnArgumentThatAutogradRecords) {
  MLP model(models::mlp_module());
  auto step = compile([](auto& m, const at::Tensor& x, at::Tensor sum) {
    sum.add_(m(x));
    return sum.sum();
  });
  auto sum = torch::zeros({8, 10});
  EXPECT_ERROR(UsageError, step(model, torch::randn({8, 10}), sum), "argument 1", "NoGradGuard");
  EXPECT_FALSE(sum.requires_grad());
  EXPECT_TRUE(at::equal(sum, torch::zeros({8, 10})));
}

TEST(CompileErrors, DataParallelNeedsTheModelAsAnArgument) {
  const MLP start(models::mlp_module());
  run_ranks(2, [&](Rank& me) {
    auto model = clone(start);
    const DataParallel mode("replicate", {.mesh = me.mesh("dp=2")});
    auto step = compile([&](const at::Tensor& x) { return model(x).sum(); }, {.parallel_mode = mode});
    EXPECT_ERROR(UsageError, step(torch::randn({8, 10})), "capture its model");
    EXPECT_ERROR(UsageError, DataParallel("zero3"), "zero3", "fully_shard");
  });
}

TEST(CompileErrors, RanksThatTraceDifferentCollectives) {
  run_ranks(2, [](Rank& me) {
    const auto group = me.group();
    auto step = compile([&](const at::Tensor& x) {
      const auto y = funcol::all_reduce(x, me.rank == 0 ? ReduceOp::Sum : ReduceOp::Max, group);
      funcol::wait(y, group);
      return y;
    });
    EXPECT_ERROR(UsageError, step(torch::ones({4})), "\"sum\"", "\"max\"");
  });
}

}  // namespace
}  // namespace tessera
