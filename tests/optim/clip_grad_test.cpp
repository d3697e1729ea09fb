// Norms and clipping of plain, distributed and Partial gradients on several meshes, some with empty local tensors.
#include "tessera/optim/clip_grad.h"
#include "tests/fixtures/full_tensor.h"

#include "tessera/base/error.h"
#include "tessera/debug/comm_debug_mode.h"
#include "tessera/dtensor/policy.h"
#include "tessera/testing/expect_error.h"
#include "tessera/testing/ranks.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <limits>

namespace tessera::optim {
namespace {

using testing::error_message;
using testing::Rank;
using testing::run_ranks;

constexpr double kInf = std::numeric_limits<double>::infinity();

torch::Tensor gradient(int64_t seed, std::vector<int64_t> sizes) {
  return torch::sin(torch::arange(c10::multiply_integers(sizes), torch::kFloat) + static_cast<double>(seed))
      .view(sizes);
}
at::Tensor parameter_with(const at::Tensor& gradient) {
  const auto p = torch::zeros_like(gradient).requires_grad_();
  p.mutable_grad() = gradient;
  return p;
}

// Four ranks. One plain gradient, three sharded over tp of a 2x2 mesh, one over both axes, one over a 1-d mesh of four.
Tensors gradients(Rank& me) {
  const auto grid = me.mesh("dp=2,tp=2"), line = me.mesh("all=4");
  const auto distribute = [](const at::Tensor& t, const DeviceMesh& mesh, Placements placements) -> at::Tensor {
    return distribute_tensor(t, mesh, placements);
  };
  return {gradient(0, {5}),
          distribute(gradient(1, {3, 4}), grid, {Replicate(), Shard(0)}),
          distribute(gradient(2, {6}), grid, {Replicate(), Shard(0)}),
          distribute(gradient(3, {1}), grid, {Replicate(), Shard(0)}),  // empty on the second rank
          distribute(gradient(4, {4, 5}), grid, {Shard(0), Shard(1)}),
          distribute(gradient(5, {9}), line, {Shard(0)}),
          distribute(gradient(6, {9}), line, {Replicate()})};
}

TEST(ClipGrad, MixedMeshesGiveTheNormOfPlainGradients) {
  run_ranks(4, [](Rank& me) {
    for (const double p : {1., 2., 3., kInf})
      for (const bool foreach : {true, false}) {
        Tensors params, expected;
        for (const auto& g : gradients(me)) {
          params.push_back(parameter_with(g));
          expected.push_back(parameter_with(fixtures::full_tensor(g).clone()));
        }
        const auto reference = clip_grad_norm_(expected, 0.7, {.norm_type = p});
        const CommPolicyScope strict(CommPolicy::Error);
        CommDebugMode mode;
        const auto total = clip_grad_norm_(params, 0.7, {.norm_type = p, .foreach = foreach});
        mode.exit();
        // One for tp, one for dp and tp, one for the 1-d mesh.
        EXPECT_EQ(mode.get_comm_counts().of(comm::CommKind::AllReduce), 3) << mode.debug_string();
        EXPECT_EQ(mode.get_comm_counts().of(comm::CommKind::AllReduce), mode.get_total_counts());
        EXPECT_FALSE(is_dtensor(total));
        EXPECT_TRUE(torch::allclose(total, reference, 1e-6)) << p << ": " << total << reference;
        for (size_t i = 0; i < params.size(); i++)
          EXPECT_TRUE(torch::allclose(fixtures::full_tensor(params[i].grad()), expected[i].grad(), 1e-5, 1e-7))
              << p << " " << i;
      }
  });
}

TEST(ClipGrad, PartialGradientsAreReducedOnce) {
  run_ranks(2, [](Rank& me) {
    const auto mesh = me.mesh("tp=2");
    const auto local = torch::full({2}, static_cast<double>(me.rank) + 1);  // 1 + 2
    const auto p = parameter_with(DTensor::from_local(local, mesh, {Partial()}));
    const auto total = clip_grad_norm_({p}, 1, {.norm_type = kInf});
    EXPECT_EQ(total.item<float>(), 3);
    EXPECT_TRUE(DTensor(p.grad()).placements()[0].is_replicate());
    EXPECT_TRUE(torch::allclose(fixtures::full_tensor(p.grad()), torch::ones(2)));
  });
}

TEST(ClipGrad, ClipGradValueClampsElements) {
  run_ranks(2, [](Rank& me) {
    const auto mesh = me.mesh("tp=2");
    const auto p = parameter_with(distribute_tensor(torch::tensor({-3., -1., 0.5, 3.}), mesh, {Shard(0)}));
    const auto before = p.grad()._version();
    clip_grad_value_({p, torch::zeros(2)}, 1);  // the second parameter has no gradient
    EXPECT_TRUE(torch::equal(fixtures::full_tensor(p.grad()), torch::tensor({-1., -1., 0.5, 1.})));
    EXPECT_GT(p.grad()._version(), before);
  });
}

TEST(ClipGrad, NormOfBFloat16IsReducedInFloat) {
  run_ranks(2, [](Rank& me) {
    const auto mesh = me.mesh("tp=2");
    const auto g = gradient(0, {64}).to(torch::kBFloat16);
    const auto total = get_total_norm({distribute_tensor(g, mesh, {Shard(0)})});
    EXPECT_EQ(total.scalar_type(), torch::kBFloat16);
    EXPECT_NEAR(total.item<float>(), g.to(torch::kFloat).norm().item<float>(), 0.03);
  });
}

TEST(ClipGrad, Errors) {
  const auto p = parameter_with(torch::tensor({1.f, std::numeric_limits<float>::infinity()}));
  EXPECT_ERROR(UsageError, clip_grad_norm_({p}, 1, {.error_if_nonfinite = true}), "norm of type 2", "inf");
  EXPECT_EQ(p.grad()[0].item<float>(), 1);
  EXPECT_ERROR(UsageError, clip_grad_norm_({p}, 1, {.norm_type = 0}), "norm_type is 0");
  EXPECT_ERROR(UsageError, clip_grad_norm_({p}, -1), "max_norm is -1");
  EXPECT_ERROR(UsageError, clip_grad_value_({p}, -1), "clip_value is -1");
  EXPECT_EQ(get_total_norm({}).item<float>(), 0);
}

}  // namespace
}  // namespace tessera::optim
