// Memory and caches do not grow: with mixed ops, and with fused AdamW and a learning rate that changes every step. The
// long form (make soak) runs 100,000 ops and 10,000 steps, the short form 10,000 and 500.
#include "small_models.h"

#include "tessera/propagate/detail/decision.h"
#include "tessera/testing/detail/soak.h"
#include "tessera/testing/ranks.h"

#include <gtest/gtest.h>

namespace tessera::test {
namespace {

using testing::long_soak;
using testing::resident_bytes;

// Runs work() to fill caches, then in two halves. The second half must not add memory or decisions.
template <class Work>
void expect_no_growth(const DeviceMesh& mesh, Work work) {
  auto& cache = propagate::decision_cache(*mesh.state());
  work(0.2);
  work(0.4);
  const auto decisions = cache.size();
  const auto bytes = resident_bytes();
  work(0.4);
  EXPECT_EQ(cache.size(), decisions);
  EXPECT_LT(resident_bytes() - bytes, testing::kSoakSlack);
}

TEST(Soak, MixedOps) {
  const int ops = long_soak() ? 100'000 : 10'000;
  const auto value = at::randn({8, 6});
  testing::run_ranks(1, [&](testing::Rank& me) {
    const auto mesh = me.mesh("dp=1,tp=1");
    at::Tensor x = distribute_tensor(value, mesh, {Shard(0), Replicate()}),
               w = distribute_tensor(value.t().contiguous(), mesh, {Replicate(), Shard(1)});
    expect_no_growth(mesh, [&](double share) {
      at::NoGradGuard no_grad;
      for (int i = 0; i < ops * share / 8; i++) {
        auto y = at::relu(x.mm(w)) * (1.0 + i);  // a Scalar that never repeats
        y.view({4, 2, 8}).add_(i);
        auto z = at::cat({y, y}, 1).sum(1);
        DTensor(z).redistribute({Replicate(), Replicate()}).to_local();
      }
    });
  });
}

TEST(Soak, FusedAdamWWithAChangingLearningRate) {
  const int steps = long_soak() ? 10'000 : 500;
  const auto start = mlp();
  testing::run_ranks(2, [&](testing::Rank& me) {
    const auto mesh = me.mesh("tp=2");
    auto model = distribute(start, mesh);
    expect_no_growth(mesh, [&](double share) { train(model, Optimizer::FusedAdamW, static_cast<int>(steps * share)); });
  });
}

}  // namespace
}  // namespace tessera::test
