// find_lr: the range test trains with growing learning rates, stops when the loss grows, and restores everything.
#include "tessera/base/error.h"
#include "tessera/comm/collectives.h"
#include "tessera/data_parallel/distributed_data_parallel.h"
#include "tessera/data_parallel/fsdp/fully_shard.h"
#include "tessera/nn/modules.h"
#include "tessera/optim/adam.h"
#include "tessera/optim/schedulers.h"
#include "tessera/optim/sgd.h"
#include "tessera/testing/expect_error.h"
#include "tessera/testing/ranks.h"

#include <torch/torch.h>

#include <cmath>
#include <limits>

namespace tessera::optim {
namespace {

using testing::Rank;
using testing::run_ranks;

nn::Sequential range_test_net() {
  nn::Sequential net(nn::Linear(4, 8), nn::Tanh(), nn::Linear(8, 1));
  const torch::NoGradGuard no_grad;
  for (auto& p : net->parameters()) p.copy_(torch::sin(torch::arange(p.numel()) * 1.3 + 1).view_as(p) * 0.5);
  return net;
}
template <class Model>
double range_test_step(Model& model, torch::optim::Optimizer& optimizer, int64_t rank = 0) {
  const auto x = torch::cos(torch::arange(32).view({8, 4}) * (1.1 + static_cast<double>(rank)));
  optimizer.zero_grad();
  auto loss = torch::mse_loss(model(x), x.sum(1, true));
  loss.backward();
  optimizer.step();
  return mean_over_ranks(loss.detach()).template item<double>();
}

TEST(FindLR, SuggestsARateThatTrainsAndRestoresTheRest) {
  run_ranks(1, [](Rank&) {
    auto net = range_test_net();
    torch::optim::Adam optimizer(net->parameters(), torch::optim::AdamOptions(0.125));
    range_test_step(net, optimizer);  // has state before
    Tensors before;
    for (const auto& p : net->parameters()) before.push_back(p.detach().clone());
    const auto found = find_lr(*net, optimizer, [&] { return range_test_step(net, optimizer); },
                               {.min_lr = 1e-5, .max_lr = 100, .steps = 60});
    EXPECT_GT(found.suggestion, 1e-4);
    EXPECT_LT(found.suggestion, 10);
    EXPECT_LT(found.lrs.size(), 60u) << "the loss grows, so the test ends early";
    ASSERT_EQ(found.lrs.size(), found.losses.size());
    EXPECT_NEAR(found.lrs[0], 1e-5, 1e-12);
    EXPECT_NEAR(found.lrs[1] / found.lrs[0], std::pow(1e7, 1.0 / 59), 1e-9);
    EXPECT_EQ(optimizer.param_groups()[0].options().get_lr(), 0.125);
    for (size_t i = 0; i < before.size(); i++) {
      EXPECT_TRUE(torch::equal(net->parameters()[i], before[i])) << i;
      EXPECT_FALSE(net->parameters()[i].grad().defined());
      const auto state = access_to(optimizer)->state(net->parameters()[i]);
      EXPECT_EQ(state.at("step").item<int64_t>(), 1);
    }
    // The suggested rate trains better than one a thousand times smaller.
    const auto loss_after = [&](double lr) {
      auto trained = range_test_net();
      torch::optim::Adam adam(trained->parameters(), torch::optim::AdamOptions(lr));
      double loss = 0;
      for (int i = 0; i < 20; i++) loss = range_test_step(trained, adam);
      return loss;
    };
    EXPECT_LT(loss_after(found.suggestion), 0.9 * loss_after(found.suggestion / 1000));
  });
}

// All ranks get the same suggestion, and a sharded training is restored too.
TEST(FindLR, OnShardedModels) {
  std::vector<double> suggestions;
  for (const int64_t n : {1, 2})
    run_ranks(n, [&](Rank& me) {
      auto net = range_test_net();
      fully_shard(net, {.mesh = me.mesh({n}, {"fsdp"})});
      AdamW optimizer(net->parameters(), {.lr = 0.5});
      const auto before = DTensor(net->parameters()[0].detach()).full_tensor().clone();
      const auto found = find_lr(*net, optimizer, [&] { return range_test_step(net, optimizer); }, {.steps = 30});
      EXPECT_TRUE(torch::equal(DTensor(net->parameters()[0].detach()).full_tensor(), before));
      EXPECT_EQ(optimizer.lr(0), 0.5);
      EXPECT_TRUE(optimizer.state(net->parameters()[0]).empty());
      if (me.rank == 0) suggestions.push_back(found.suggestion);
    });
  EXPECT_NEAR(suggestions[1], suggestions[0], 1e-6);
}

TEST(FindLR, AStepThatThrowsAndALossThatIsNotANumber) {
  auto net = range_test_net();
  SGD optimizer(net->parameters(), {.lr = 0.5});
  const auto before = net->parameters()[0].detach().clone();
  int64_t steps = 0;
  const auto fail = [&]() -> double {
    const torch::NoGradGuard no_grad;
    net->parameters()[0].add_(1);
    if (++steps == 3) throw std::runtime_error("no more batches");
    return 1.0 / static_cast<double>(steps);
  };
  EXPECT_THROW(find_lr(*net, optimizer, fail), std::runtime_error);
  EXPECT_TRUE(torch::equal(net->parameters()[0], before));
  EXPECT_EQ(optimizer.lr(0), 0.5);

  const auto never_falls = find_lr(*net, optimizer, [] { return 1.0; }, {.steps = 10});
  EXPECT_EQ(never_falls.suggestion, 0);
  const auto nan = find_lr(*net, optimizer, [] { return std::numeric_limits<double>::quiet_NaN(); }, {.steps = 10});
  EXPECT_TRUE(nan.lrs.empty());
  EXPECT_ERROR(UsageError, find_lr(*net, optimizer, [] { return 1.0; }, {.min_lr = 1, .max_lr = 0.1}), "max_lr 0.1");
}

}  // namespace
}  // namespace tessera::optim
