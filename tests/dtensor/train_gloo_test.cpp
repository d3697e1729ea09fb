// The training of train_test.cpp with four processes and Gloo.
#include "small_models.h"

#include "tessera/testing/spawn.h"

#include <gtest/gtest.h>

namespace tessera::test {
namespace {

TEST(TrainGloo, FourProcesses) {
  testing::spawn_ranks(4, [](testing::Rank& me) {
    for (const auto& start : {mlp(), transformer()})
      for (auto optimizer : {Optimizer::Sgd, Optimizer::FusedAdamW}) {
        auto plain = copy(start);
        const auto losses = train(plain, optimizer, 20);
        expect_trains_like(plain, losses, start, me.mesh("dp=2,tp=2"), optimizer);
      }
  });
}

}  // namespace
}  // namespace tessera::test
