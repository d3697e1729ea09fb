// CommPolicy, ImplicitReplication, and plain tensors next to distributed ones.
#include "tessera/dtensor/policy.h"

#include "tessera/base/error.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/testing/expect_error.h"
#include "tessera/testing/ranks.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

namespace tessera {
namespace {

using testing::error_message;
using testing::Rank;
using testing::run_ranks;

TEST(CommPolicy, ErrorRejectsImplicitCommunication) {
  run_ranks(2, [](Rank& me) {
    const auto mesh = me.mesh("tp=2");
    const auto ones = torch::ones({4, 4});
    const at::Tensor rows = distribute_tensor(ones, mesh, {Shard(0)}),
                     columns = distribute_tensor(ones, mesh, {Shard(1)});
    const at::Tensor sum = rows.sum(0);  // P(sum)
    CommPolicyScope strict(CommPolicy::Error);
    const auto message = error_message([&] { rows + columns; });
    EXPECT_CONTAINS(message, "aten::add.Tensor");
    EXPECT_CONTAINS(message, "CommPolicy::Allow");
    EXPECT_CONTAINS(message, "tp=2");
    EXPECT_THROW(sum.relu(), ShardingError);
    EXPECT_THROW(sum.sum().item(), ShardingError);
    EXPECT_THROW(at::equal(sum, sum), ShardingError);
    EXPECT_TRUE((rows + rows).defined());                                          // no redistribution
    EXPECT_TRUE((rows + distribute_tensor(ones, mesh, {Replicate()})).defined());  // a local slice, no communication
    // Explicit communication and its backward are allowed.
    DTensor(columns).redistribute({Shard(0)});
    DTensor(sum).full_tensor();
    at::Tensor x = distribute_tensor(ones, mesh, {Shard(0)}).set_requires_grad(true);
    (DTensor(x).redistribute({Replicate()}) * 2).sum().backward();
    {
      CommPolicyScope lax(CommPolicy::Allow);
      EXPECT_TRUE((rows + columns).defined());
    }
    EXPECT_THROW(rows + columns, ShardingError);
  });
}

TEST(CommPolicy, ErrorReachesBackwardAndTheOptimizer) {
  run_ranks(2, [](Rank& me) {
    const auto mesh = me.mesh("dp=2");
    at::Tensor w = distribute_tensor(torch::ones({3, 3}), mesh).set_requires_grad(true);
    const at::Tensor x = distribute_tensor(torch::ones({4, 3}), mesh, {Shard(0)});
    CommPolicyScope strict(CommPolicy::Error);
    x.mm(w).sum().backward();  // the gradient stays partial: no communication
    ASSERT_TRUE(DTensor(w.grad()).placements()[0].is_partial());
    torch::NoGradGuard no_grad;
    EXPECT_THROW(w.add_(w.grad(), -1), ShardingError);
    w.add_(DTensor(w.grad()).redistribute({Replicate()}), -1);
    EXPECT_EQ(DTensor(w.detach()).to_local()[0][0].item<float>(), -3);
  });
}

TEST(CommPolicy, WarnPrintsAWarning) {
  struct Counter : c10::WarningHandler {
    int warnings = 0;
    void process(const c10::Warning&) override { warnings++; }
  };
  run_ranks(2, [](Rank& me) {
    const auto mesh = me.mesh("tp=2");
    const at::Tensor rows = distribute_tensor(torch::ones({4, 4}), mesh, {Shard(0)}),
                     columns = distribute_tensor(torch::ones({4, 4}), mesh, {Shard(1)});
    Counter counter;
    c10::WarningUtils::WarningHandlerGuard guard(&counter);
    CommPolicyScope scope(CommPolicy::Warn);
    rows + columns;
    EXPECT_EQ(counter.warnings, 1);
  });
}

TEST(PlainTensors, AreRejectedWithArgumentName) {
  run_ranks(2, [](Rank& me) {
    const at::Tensor d = distribute_tensor(torch::ones({4, 3}), me.mesh("tp=2"), {Shard(0)});
    const auto message = error_message([&] { d + torch::ones({4, 3}); });
    EXPECT_CONTAINS(message, "argument 1 'other'");
    EXPECT_CONTAINS(message, "[4, 3]");
    EXPECT_CONTAINS(message, "distribute_tensor");
    EXPECT_CONTAINS(error_message([&] { at::cat({d, torch::ones({4, 3})}); }), "element 1");
    EXPECT_CONTAINS(error_message([&] { torch::ones({4, 3}).add_(d); }), "argument 0 'self'");
    // A plain tensor of one element is accepted.
    EXPECT_EQ(DTensor(d * torch::tensor(2.)).full_tensor().sum().item<float>(), 24);
    ImplicitReplication scope;
    EXPECT_EQ(DTensor(d + torch::ones({4, 3})).full_tensor().sum().item<float>(), 24);
  });
}

TEST(Meshes, TensorsOfTwoMeshesAreRejected) {
  run_ranks(2, [](Rank& me) {
    const at::Tensor a = distribute_tensor(torch::ones({4}), me.mesh("a=2"), {Shard(0)}),
                     b = distribute_tensor(torch::ones({4}), me.mesh("b=2"), {Shard(0)});
    const auto message = error_message([&] { a + b; });
    EXPECT_CONTAINS(message, "a=2");
    EXPECT_CONTAINS(message, "b=2");
    // Two meshes with equal shape and names are one mesh.
    EXPECT_TRUE((a + distribute_tensor(torch::ones({4}), me.mesh("a=2"), {Shard(0)})).defined());
  });
}

TEST(Rules, TheErrorOfAnOpWithoutRuleNamesThreeAlternatives) {
  run_ranks(2, [](Rank& me) {
    at::Tensor d = distribute_tensor(torch::eye(4), me.mesh("tp=2"), {Shard(0)});
    const auto message = error_message([&] { at::_resize_output_(d, {2, 2}, at::kCPU); });  // it replaces the memory
    EXPECT_CONTAINS(message, "register_sharding");
    EXPECT_CONTAINS(message, "local_map");
    EXPECT_CONTAINS(message, "Replicate");
    EXPECT_CONTAINS(message, "S(0)");
  });
}

}  // namespace
}  // namespace tessera
