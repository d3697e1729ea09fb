// Small models trained for 20 steps, on meshes from one rank to dp 2 x tp 2: equal to the plain model within 1e-6.
#include "small_models.h"

#include "tessera/propagate/detail/decision.h"
#include "tessera/testing/ranks.h"

#include <gtest/gtest.h>

namespace tessera::test {
namespace {

struct MeshCase {
  const char* mesh;
  int ranks;
};
constexpr MeshCase kMeshes[] = {{"tp=1", 1}, {"dp=2", 2}, {"tp=2", 2}, {"tp=3", 3}, {"dp=2,tp=2", 4}};

void expect_trains_like_plain(Model (*make)(), Optimizer optimizer) {
  const auto start = make();  // once, because thread ranks share LibTorch's generator
  auto plain = copy(start);
  const auto losses = train(plain, optimizer, 20);
  EXPECT_LT(losses.back(), losses.front());  // the model learns, so the comparison is meaningful
  for (const auto& c : kMeshes) {
    SCOPED_TRACE(c.mesh);
    testing::run_ranks(
        c.ranks, [&](testing::Rank& me) { expect_trains_like(plain, losses, start, me.mesh(c.mesh), optimizer); });
  }
}

TEST(Train, MlpSgd) { expect_trains_like_plain(mlp, Optimizer::Sgd); }
TEST(Train, MlpFusedAdamW) { expect_trains_like_plain(mlp, Optimizer::FusedAdamW); }
TEST(Train, TransformerSgd) { expect_trains_like_plain(transformer, Optimizer::Sgd); }
TEST(Train, TransformerFusedAdamW) { expect_trains_like_plain(transformer, Optimizer::FusedAdamW); }

TEST(Train, LlamaSgd) { expect_trains_like_plain(llama, Optimizer::Sgd); }
TEST(Train, LlamaFusedAdamW) { expect_trains_like_plain(llama, Optimizer::FusedAdamW); }
TEST(Train, ConvNetSgd) { expect_trains_like_plain(conv_net, Optimizer::Sgd); }

// From the second step on every decision is cached, also with a changing learning rate.
TEST(Train, NoCacheMissesFromTheSecondStep) {
  const auto start = transformer();
  for (auto optimizer : {Optimizer::Sgd, Optimizer::FusedAdamW})
    testing::run_ranks(4, [&](testing::Rank& me) {
      const auto mesh = me.mesh("dp=2,tp=2");
      auto model = distribute(start, mesh);
      auto& cache = propagate::decision_cache(*mesh.state());
      train(model, optimizer, 1);
      const auto misses = cache.misses();
      train(model, optimizer, 5);
      EXPECT_EQ(cache.misses(), misses);
      EXPECT_GT(cache.hits(), 500u);
    });
}

}  // namespace
}  // namespace tessera::test
