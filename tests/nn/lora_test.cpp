// Low-rank adapters.
#include "tessera/base/error.h"
#include "tessera/data_parallel/fsdp/fully_shard.h"
#include "tessera/nn/modules.h"
#include "tessera/testing/expect_error.h"
#include "tessera/testing/ranks.h"

#include <torch/torch.h>

namespace tessera {
namespace {

nn::Sequential make_lora_net() {
  nn::Sequential net(nn::Linear(6, 12), nn::Tanh(), nn::Linear(12, 4));
  const torch::NoGradGuard no_grad;
  for (auto& p : net->parameters()) p.copy_(torch::sin(torch::arange(p.numel()) * 1.3).view_as(p) * 0.3);
  return net;
}
at::Tensor train_lora(nn::Sequential& net, const at::Tensor& x, int steps) {
  torch::optim::Adam optimizer(nn::lora::parameters(*net), torch::optim::AdamOptions(0.05));
  at::Tensor loss;
  for (int step = 0; step < steps; step++) {
    optimizer.zero_grad();
    loss = torch::mse_loss(net(x), x.slice(1, 0, 4).cos());
    loss.backward();
    optimizer.step();
  }
  return loss.detach();
}

TEST(Lora, StartsAsTheModuleTrainsOnlyAdaptersAndMerges) {
  auto net = make_lora_net();
  const auto x = torch::sin(torch::arange(48).view({8, 6}) * 0.7);
  const auto before = net(x).detach(), weight = net->parameters()[0].detach().clone();
  EXPECT_EQ(nn::lora::add(*net, {.rank = 2, .alpha = 4}), (std::vector<std::string>{"0", "2"}));
  EXPECT_TRUE(torch::equal(net(x), before));
  EXPECT_EQ(nn::lora::parameters(*net).size(), 4u);
  for (const auto& item : net->named_parameters())
    EXPECT_EQ(item.value().requires_grad(), item.key().find("lora_") != std::string::npos) << item.key();
  const auto first = train_lora(net, x, 1), last = train_lora(net, x, 30);
  EXPECT_LT(last.item<double>(), 0.5 * first.item<double>());
  EXPECT_TRUE(torch::equal(net->parameters()[0], weight));
  const auto trained = net(x).detach();
  nn::lora::merge(*net);
  EXPECT_FALSE(torch::equal(net->parameters()[0], weight));
  EXPECT_TRUE(torch::allclose(net(x), trained, 1e-5, 1e-6));
}

TEST(Lora, Targets) {
  auto net = make_lora_net();
  EXPECT_EQ(nn::lora::add(*net, {.rank = 1, .targets = {"2"}}), std::vector<std::string>{"2"});
  EXPECT_ERROR(UsageError, nn::lora::add(*net, {.targets = {"2"}}), "'2'", "already");
  EXPECT_ERROR(UsageError, nn::lora::add(*net, {.targets = {"wq"}}), "Sequential", "target");
  EXPECT_ERROR(UsageError, nn::lora::add(*torch::nn::Sequential(torch::nn::Linear(2, 2))), "ts::nn::Linear");
  EXPECT_ERROR(UsageError, nn::lora::add(*net, {.rank = 0}), "rank is 0");
}

TEST(Lora, WithFullyShard) {
  const auto x = torch::sin(torch::arange(48).view({8, 6}) * 0.7);
  const auto make = [] {
    auto net = make_lora_net();
    nn::lora::add(*net, {.rank = 2});
    const torch::NoGradGuard no_grad;
    for (auto& p : nn::lora::parameters(*net)) p.copy_(torch::cos(torch::arange(p.numel())).view_as(p) * 0.1);
    return net;
  };
  auto plain = make();
  const auto expected = train_lora(plain, x, 5).item<double>();
  testing::run_ranks(2, [&](testing::Rank& me) {
    auto net = make();
    fully_shard(net, {.mesh = me.mesh({2}, {"fsdp"})});
    EXPECT_NEAR(train_lora(net, x, 5).item<double>(), expected, 1e-5);  // every rank has the full batch
    EXPECT_ERROR(UsageError, nn::lora::merge(*net), "distributed");
  });
}

}  // namespace
}  // namespace tessera
