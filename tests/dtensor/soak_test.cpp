// Nothing grows: mixed ops, and fused AdamW with a learning rate that changes every step. The long form (make soak)
// runs 100,000 ops and 10,000 steps; the short one a tenth and a twentieth of that.
#include "small_models.h"

#include "tessera/base/settings.h"
#include "tessera/propagate/decision.h"
#include "tessera/testing/ranks.h"

#include <gtest/gtest.h>

#include <unistd.h>
#include <fstream>

namespace tessera::test {
namespace {

bool long_form() { return setting("TESSERA_SOAK") == "1"; }

int64_t resident_bytes() {
  int64_t total = 0, resident = 0;
  std::ifstream("/proc/self/statm") >> total >> resident;
  return resident * sysconf(_SC_PAGESIZE);
}

// Runs once to fill caches, then again in two halves: the second half must add nothing.
template <class Work>
void expect_flat(const DeviceMesh& mesh, Work work) {
  auto& cache = propagate::decision_cache(*mesh.state());
  work(0.2);
  work(0.4);
  const auto decisions = cache.size();
  const auto bytes = resident_bytes();
  work(0.4);
  EXPECT_EQ(cache.size(), decisions);
  EXPECT_LT(resident_bytes() - bytes, int64_t{4} << 20);
}

TEST(Soak, MixedOps) {
  const int ops = long_form() ? 100'000 : 10'000;
  const auto value = at::randn({8, 6});
  testing::run_ranks(1, [&](testing::Rank& me) {
    const auto mesh = me.mesh("dp=1,tp=1");
    at::Tensor x = distribute_tensor(value, mesh, {Shard(0), Replicate()}),
               w = distribute_tensor(value.t().contiguous(), mesh, {Replicate(), Shard(1)});
    expect_flat(mesh, [&](double share) {
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
  const int steps = long_form() ? 10'000 : 500;
  const auto start = mlp();
  testing::run_ranks(2, [&](testing::Rank& me) {
    const auto mesh = me.mesh("tp=2");
    auto model = distribute(start, mesh);
    expect_flat(mesh, [&](double share) { train(model, Optimizer::FusedAdamW, static_cast<int>(steps * share)); });
  });
}

}  // namespace
}  // namespace tessera::test
