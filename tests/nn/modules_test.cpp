#include "tessera/nn/modules.h"

#include "tessera/nn/detail/hookable.h"
#include "tessera/testing/expect_error.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

namespace tessera {
namespace {

// The number of calls of a module.
std::shared_ptr<int> count_calls(Module& module) {
  auto calls = std::make_shared<int>(0);
  register_forward_hook(module, [calls](Module&, const Tensors&, const Tensors&) { ++*calls; });
  return calls;
}

TEST(Modules, RMSNormComputesTheFormula) {
  nn::RMSNorm norm(6, 1e-5);
  torch::NoGradGuard no_grad;
  norm->weight.normal_();
  const auto x = torch::randn({2, 6});
  const auto expected = x / (x.pow(2).mean(-1, true) + 1e-5).sqrt() * norm->weight;
  EXPECT_TRUE(torch::allclose(norm(x), expected, 1e-6, 1e-6));
  EXPECT_EQ(c10::str(norm), "tessera::nn::RMSNorm([6], eps=1e-05, elementwise_affine=true)");
  nn::RMSNormOptions bare(6);
  bare.elementwise_affine = false;
  EXPECT_TRUE(nn::RMSNorm(bare)->parameters().empty());
}

TEST(Modules, HoldersAcceptTheArgumentsOfTorchHolders) {
  nn::Conv2d conv(torch::nn::Conv2dOptions(3, 4, 3).padding(1));
  EXPECT_EQ(conv(torch::ones({1, 3, 5, 5})).sizes(), (std::vector<int64_t>{1, 4, 5, 5}));
  nn::LSTM lstm(torch::nn::LSTMOptions(3, 4).batch_first(true));
  auto calls = count_calls(*lstm);
  auto [out, state] = lstm(torch::ones({2, 5, 3}));  // the second argument has a default
  EXPECT_EQ(out.size(2), 4);
  EXPECT_EQ(*calls, 1);
  nn::MultiheadAttention attention(torch::nn::MultiheadAttentionOptions(4, 2));
  calls = count_calls(*attention);
  const auto q = torch::ones({3, 1, 4});
  EXPECT_EQ(std::get<0>(attention(q, q, q)).sizes(), q.sizes());
  EXPECT_EQ(*calls, 1);
  auto pretrained = nn::Embedding::from_pretrained(torch::ones({3, 2}));
  EXPECT_FALSE(pretrained->weight.requires_grad());
}

TEST(Modules, ContainersIterateOverHolders) {
  nn::ModuleList<nn::Linear> list(std::vector<nn::Linear>{nn::Linear(2, 2), nn::Linear(2, 2)});
  auto x = torch::ones({1, 2});
  int calls = 0;
  list[1].register_forward_hook([&](Module&, const Tensors&, const Tensors&) { calls++; });
  for (auto& linear : list) x = linear(x);
  EXPECT_EQ(calls, 1);
  EXPECT_EQ(list->named_parameters().keys()[2], "1.weight");
  nn::ModuleDict<nn::Linear> dict(std::vector<std::pair<std::string, nn::Linear>>{{"a", nn::Linear(2, 3)}});
  EXPECT_EQ(dict["a"](x).size(1), 3);
  EXPECT_ERROR(UsageError, dict["b"], "ModuleDict has no 'b'; it has a");
}

TEST(Modules, SequentialRunsTheHooksOfItsChildren) {
  nn::Sequential net(nn::Linear(2, 3), nn::ReLU(), nn::Linear(3, 1));
  const auto calls = count_calls(*net->ptr(2));
  const auto root_calls = count_calls(*net);
  net(torch::ones({1, 2}));
  net->forward(torch::ones({1, 2}));
  EXPECT_EQ(*calls, 2);
  EXPECT_EQ(*root_calls, 2);
}

TEST(Modules, HookableReplacesTorchChildrenOfASequential) {
  torch::nn::Sequential plain(torch::nn::Linear(2, 3), torch::nn::Linear(3, 1));
  const auto weight = plain->named_parameters()["1.weight"];
  const auto before = plain->forward(torch::ones({1, 2}));
  const auto child = hookable(*plain, "1");
  const auto calls = count_calls(*child);
  EXPECT_TRUE(torch::equal(plain->forward(torch::ones({1, 2})), before));
  EXPECT_EQ(*calls, 1);
  EXPECT_TRUE(plain->named_parameters()["1.weight"].is_same(weight));
  EXPECT_NE(child->as<torch::nn::LinearImpl>(), nullptr);
  EXPECT_EQ(hookable(*plain, "1"), child);
}

struct PlainImpl : torch::nn::Module {
  PlainImpl() { fc = register_module("fc", torch::nn::Linear(2, 2)); }
  torch::Tensor forward(torch::Tensor x) { return fc(x); }
  torch::nn::Linear fc{nullptr};
};
TORCH_MODULE(Plain);

TEST(Modules, TheErrorForAModuleWithoutHooksNamesTheHolderToUse) {
  Plain plain;
  EXPECT_ERROR(UsageError, hookable(*plain, "fc"), "'fc'", "tessera::nn::Linear instead of torch::nn::Linear");
  EXPECT_ERROR(UsageError, hookable(*plain, ""), "TESSERA_MODULE(Plain)");
  EXPECT_ERROR(UsageError, hookable(*plain, "fd"), "module 'fd' does not exist", "children fc");
  EXPECT_ERROR(UsageError, register_forward_hook(*plain, [](Module&, const Tensors&, const Tensors&) {}),
               "TESSERA_MODULE(Plain)");
}

TEST(Modules, GetParameterFindsParametersByName) {
  nn::Sequential net(nn::Linear(2, 3), nn::BatchNorm1d(3));
  EXPECT_TRUE(get_parameter(*net, "0.weight").is_same(net->named_parameters()["0.weight"]));
  EXPECT_EQ(get_buffer(*net, "1.running_mean").size(0), 3);
  EXPECT_ERROR(UsageError, net.get_parameter("0.wait"), "parameter '0.wait' does not exist", "Linear", "weight, bias");
}

}  // namespace
}  // namespace tessera
