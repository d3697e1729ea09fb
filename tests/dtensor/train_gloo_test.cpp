// The training of train_test.cpp with four processes and Gloo.
#include "small_models.h"

#include "tessera/testing/spawn.h"

#include <gtest/gtest.h>

#include <algorithm>

namespace tessera::test {
namespace {

void expect_trains_like_plain(const Model& start, Optimizer optimizer, testing::Rank& me) {
  auto plain = copy(start);
  const auto losses = train(plain, optimizer, 20);
  auto model = distribute(start, me.mesh("dp=2,tp=2"));
  const auto got = train(model, optimizer, 20);
  for (size_t i = 0; i < losses.size(); i++)
    ASSERT_NEAR(got[i], losses[i], 1e-6 * std::max(1.0, losses[i])) << "loss of step " << i;
  for (auto& [name, t] : model.parameters) {
    const auto full = DTensor(t.detach()).full_tensor();
    EXPECT_LE((full - plain.parameters[name].detach()).abs().max().item<double>(), 1e-6) << name;
  }
}

TEST(TrainGloo, FourProcesses) {
  testing::spawn_ranks(4, [](testing::Rank& me) {
    for (auto optimizer : {Optimizer::Sgd, Optimizer::FusedAdamW}) {
      expect_trains_like_plain(mlp(), optimizer, me);
      expect_trains_like_plain(transformer(), optimizer, me);
    }
  });
}

}  // namespace
}  // namespace tessera::test
