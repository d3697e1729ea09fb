// The seed of a run determines its dropout masks, on any mesh. Ranks are processes, as in `tessera train`: thread ranks
// share LibTorch's generator.
#include "tessera/dtensor/random.h"
#include "tessera/testing/spawn.h"
#include "tests/train/tiny_run.h"

#include <random>

namespace tessera::train {
namespace {

std::vector<double> losses_with_dropout(const World& world, const std::string& mesh, uint64_t seed, double dropout) {
  at::manual_seed(std::random_device()());  // as a new process starts
  auto config = tiny();
  config.model.dropout = dropout;
  config.training.seed = seed;
  config.parallel.mesh = mesh;
  Trainer trainer(config, world);
  std::vector<double> losses;
  for (int i = 0; i < 3; i++) losses.push_back(trainer.step().metrics.loss);
  return losses;
}

void expect_seeded(const World& world, const std::string& mesh) {
  SCOPED_TRACE(mesh);
  const auto first = losses_with_dropout(world, mesh, 3, 0.3);
  EXPECT_EQ(losses_with_dropout(world, mesh, 3, 0.3), first);
  EXPECT_NE(losses_with_dropout(world, mesh, 3, 0), first);  // dropout had an effect
}

TEST(TrustSeededDropout, OneRankRepeatsItsLosses) {
  run_ranks(1, [](Rank& me) { expect_seeded(me.world, ""); });
}

TEST(TrustSeededDropout, TwoRanksRepeatTheirLosses) {
  testing::spawn_ranks(2, [](Rank& me) {
    for (const std::string mesh : {"dp=2", "fsdp=2", "tp=2"}) expect_seeded(me.world, mesh);
  });
}

}  // namespace
}  // namespace tessera::train
