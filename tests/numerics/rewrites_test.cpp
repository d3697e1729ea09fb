#include "tessera/numerics/numerics.h"

#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/policy.h"
#include "tessera/optim/adam.h"
#include "tessera/optim/sgd.h"
#include "tessera/testing/ranks.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>

namespace {

using Tensors = std::vector<at::Tensor>;
struct RewrittenCall {
  const char* name;
  Tensors inputs;  // in float64; those of floating point get gradients
  std::function<at::Tensor(const Tensors&)> call;
};

at::Tensor values(at::IntArrayRef sizes) { return torch::randn(sizes, torch::kDouble); }

std::vector<RewrittenCall> rewritten_calls() {
  const auto attention = [](bool causal) {
    return [causal](const Tensors& t) { return at::scaled_dot_product_attention(t[0], t[1], t[2], {}, 0, causal); };
  };
  const auto cross_entropy = [](const Tensors& t) { return at::cross_entropy_loss(t[0], t[1]); };
  auto some_ignored = torch::randint(9, {14});
  some_ignored[3] = -100;
  return {
      {"mm", {values({5, 7}), values({7, 3})}, [](const Tensors& t) { return at::mm(t[0], t[1]); }},
      {"bmm", {values({2, 5, 7}), values({2, 7, 3})}, [](const Tensors& t) { return at::bmm(t[0], t[1]); }},
      {"linear",
       {values({2, 5, 7}), values({3, 7}), values({3})},
       [](const Tensors& t) { return at::linear(t[0], t[1], t[2]); }},
      {"addmm",
       {values({3}), values({5, 7}), values({7, 3})},
       [](const Tensors& t) { return at::addmm(t[0], t[1], t[2], 0.5, 2); }},
      {"sum", {values({4, 5, 6})}, [](const Tensors& t) { return t[0].sum(); }},
      {"sum dims",
       {values({4, 5, 6})},
       [](const Tensors& t) {
         return t[0].sum(at::IntArrayRef{0, 2}, true);
       }},
      {"mean", {values({4, 5, 6})}, [](const Tensors& t) { return t[0].mean(); }},
      {"mean dim", {values({4, 5, 6})}, [](const Tensors& t) { return t[0].mean(-1); }},
      {"mse_loss", {values({4, 5}), values({4, 5})}, [](const Tensors& t) { return at::mse_loss(t[0], t[1]); }},
      {"softmax", {values({4, 9})}, [](const Tensors& t) { return at::softmax(t[0], 1); }},
      {"log_softmax", {values({4, 9})}, [](const Tensors& t) { return at::log_softmax(t[0], -1); }},
      {"cross entropy", {values({14, 9}), torch::randint(9, {14})}, cross_entropy},
      {"cross entropy, ignored", {values({14, 9}), some_ignored}, cross_entropy},
      {"layer_norm",
       {values({3, 4, 11}), values({11}), values({11})},
       [](const Tensors& t) { return at::layer_norm(t[0], {11}, t[1], t[2]); }},
      {"rms_norm",
       {values({3, 4, 11}), values({11})},
       [](const Tensors& t) { return at::rms_norm(t[0], {11}, t[1], 1e-5); }},
      {"embedding",
       {values({11, 4}), torch::randint(11, {3, 8})},
       [](const Tensors& t) { return at::embedding(t[0], t[1]); }},
      {"attention", {values({2, 3, 5, 4}), values({2, 3, 5, 4}), values({2, 3, 5, 4})}, attention(false)},
      {"causal attention", {values({2, 3, 5, 4}), values({2, 3, 5, 4}), values({2, 3, 5, 4})}, attention(true)},
      {"attention on transposed heads",
       {values({2, 5, 3, 4}), values({2, 5, 3, 4}), values({2, 5, 3, 4})},
       [=](const Tensors& t) {
         return attention(true)({t[0].transpose(1, 2), t[1].transpose(1, 2), t[2].transpose(1, 2)});
       }},
      {"convolution",
       {values({4, 3, 7, 6}), values({5, 3, 3, 2}), values({5})},
       [](const Tensors& t) {
         return at::conv2d(t[0], t[1], t[2], {2, 1}, {1, 0}, {1, 2});
       }},
      {"grouped convolution",
       {values({4, 4, 5, 5}), values({6, 2, 3, 3}), values({6})},
       [](const Tensors& t) { return at::conv2d(t[0], t[1], t[2], 1, 1, 1, 2); }},
      {"1-D convolution",
       {values({4, 3, 9}), values({2, 3, 4}), values({2})},
       [](const Tensors& t) { return at::conv1d(t[0], t[1], t[2], 2, 1); }},
      {"max_pool2d", {values({4, 3, 6, 6})}, [](const Tensors& t) { return at::max_pool2d(t[0], 3, 2); }},
      {"avg_pool2d", {values({4, 3, 6, 6})}, [](const Tensors& t) { return at::avg_pool2d(t[0], 3, 2); }},
      {"adaptive_avg_pool2d",
       {values({4, 3, 7, 7})},
       [](const Tensors& t) {
         return at::adaptive_avg_pool2d(t[0], {3, 2});
       }},
      {"norm", {values({4, 5})}, [](const Tensors& t) { return at::linalg_vector_norm(t[0], 2); }},
      {"gelu", {values({3, 7})}, [](const Tensors& t) { return at::gelu(t[0], "tanh"); }},
  };
}

// The result, then the gradients.
Tensors run_call(const RewrittenCall& call) {
  Tensors inputs;
  for (const auto& t : call.inputs) inputs.push_back(t.is_floating_point() ? t.detach().clone().requires_grad_() : t);
  auto y = call.call(inputs);
  (y * torch::arange(1, y.numel() + 1, torch::kDouble).view(y.sizes())).sum().backward();
  Tensors found = {y.detach()};
  for (const auto& t : inputs)
    if (t.is_floating_point()) found.push_back(t.grad());
  return found;
}

TEST(InvariantRewrites, HaveTheValuesAndGradientsOfTheDefault) {
  for (const auto& call : rewritten_calls()) {
    const auto expected = run_call(call);
    const tessera::NumericsScope scope(tessera::Numerics::Invariant);
    const auto found = run_call(call);
    ASSERT_EQ(found.size(), expected.size());
    for (size_t i = 0; i < found.size(); i++) {
      ASSERT_EQ(found[i].sizes(), expected[i].sizes()) << call.name << " " << i;
      EXPECT_LT((found[i] - expected[i]).abs().max().item<double>(), 1e-9) << call.name << " " << i;
    }
  }
}

// Sums by an index. On DTensors they are refused or local, so they are not in the list above.
TEST(InvariantRewrites, SumsByAnIndexHaveTheValuesOfTheDefault) {
  const auto index = torch::randint(4, {9}), indices = torch::randint(5, {6, 3});
  const std::vector<RewrittenCall> calls = {
      {"index_add", {values({4, 3}), values({9, 3})}, [&](const Tensors& t) { return t[0].index_add(0, index, t[1]); }},
      {"index_add, dim 1",
       {values({3, 4, 2}), values({3, 9, 2})},
       [&](const Tensors& t) { return t[0].index_add(1, index, t[1]); }},
      {"index_select", {values({4, 3})}, [&](const Tensors& t) { return t[0].index_select(0, index); }},
      {"scatter_add",
       {values({7, 5}), values({6, 3})},
       [&](const Tensors& t) { return t[0].scatter_add(1, indices, t[1]); }},
      {"gather", {values({6, 5})}, [&](const Tensors& t) { return t[0].gather(1, indices); }},
  };
  for (const auto& call : calls) {
    const auto expected = run_call(call);
    const tessera::NumericsScope scope(tessera::Numerics::Invariant);
    const auto found = run_call(call);
    for (size_t i = 0; i < found.size(); i++)
      EXPECT_LT((found[i] - expected[i]).abs().max().item<double>(), 1e-12) << call.name << " " << i;
  }
}

// The same on DTensors, replicated and with dim 0 of the first input sharded.
TEST(InvariantRewrites, HaveTheValuesAndGradientsOfTheDefaultOnDTensors) {
  const auto calls = rewritten_calls();
  for (const int64_t ranks : {1, 2})
    tessera::testing::run_ranks(ranks, [&](tessera::testing::Rank& me) {
      const auto mesh = me.mesh("dp=" + std::to_string(ranks));
      for (const auto& call : calls) {
        const auto expected = run_call(call);
        for (const auto& first : {tessera::Replicate(), tessera::Shard(0)}) {
          RewrittenCall distributed{call.name, {}, call.call};
          for (const auto& t : call.inputs)
            distributed.inputs.push_back(tessera::distribute_tensor(
                t, mesh, {&t == call.inputs.data() ? first : tessera::Replicate()}, {.src_data_rank = std::nullopt}));
          Tensors found;
          {
            const tessera::NumericsScope scope(tessera::Numerics::Invariant);
            const tessera::ImplicitReplication plain_factors;
            found = run_call(distributed);
          }
          ASSERT_EQ(found.size(), expected.size());
          for (size_t i = 0; i < found.size(); i++)
            EXPECT_LT((tessera::DTensor(found[i]).full_tensor() - expected[i]).abs().max().item<double>(), 1e-9)
                << call.name << " " << i << " " << first << " on " << ranks;
        }
      }
    });
}

template <class Optimizer, class Options>
at::Tensor after_steps(const Options& options, bool invariant) {
  const auto p = torch::sin(torch::arange(100, torch::kDouble)).requires_grad_();
  Optimizer optimizer({p}, options);
  const tessera::NumericsScope scope(invariant ? tessera::Numerics::Invariant : tessera::Numerics::Strict);
  for (int i = 1; i < 4; i++) {
    p.mutable_grad() = torch::cos(torch::arange(100, torch::kDouble) * i);
    optimizer.step();
  }
  return p.detach().clone();
}

TEST(InvariantRewrites, OptimizersHaveTheValuesOfTheDefault) {
  using tessera::optim::AdamW;
  using tessera::optim::SGD;
  const auto distance = [](const at::Tensor& a, const at::Tensor& b) { return (a - b).abs().max().item<double>(); };
  const tessera::optim::AdamWOptions adam{.lr = 0.1};
  EXPECT_LT(distance(after_steps<AdamW>(adam, true), after_steps<AdamW>(adam, false)), 1e-12);
  const tessera::optim::SGDOptions sgd{.lr = 0.1, .momentum = 0.9};
  EXPECT_LT(distance(after_steps<SGD>(sgd, true), after_steps<SGD>(sgd, false)), 1e-12);
}

}  // namespace
