// Compiled steps under Numerics::Invariant have the bits of eager ones, and the scope is part of the key of a program.
#include "tessera/compile/api/compile.h"
#include "tessera/data_parallel/virtual_shards.h"
#include "tessera/dtensor/detail/full_tensor_or_self.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/models/mlp.h"
#include "tessera/numerics/numerics.h"
#include "tessera/optim/adam.h"
#include "tessera/testing/expect_error.h"
#include "tessera/testing/ranks.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

namespace ts = tessera;

namespace {

const ts::models::MLPConfig kMLP = {
    {{"net1", 12, 33, ts::models::Activation::Sigmoid}, {"net2", 33, 10, ts::models::Activation::None}}, true, 5};

at::Tensor batch_of(int64_t rows) { return torch::sin(torch::arange(rows * 12).view({rows, 12}) * 0.37); }

bool same_bits(const at::Tensor& l, const at::Tensor& r) {
  return l.sizes() == r.sizes() && torch::equal(l.contiguous().view(at::kInt), r.contiguous().view(at::kInt));
}

// The loss and the weights after three steps.
std::vector<at::Tensor> train(bool compiled, ts::Numerics option, ts::Numerics scope_numerics) {
  ts::models::MLP model(kMLP);
  ts::optim::AdamW optimizer(model->parameters(), {.lr = 1e-2, .fused = true});
  auto step = [](ts::models::MLP& model, ts::optim::AdamW& optimizer, const at::Tensor& x) {
    optimizer.zero_grad();
    const auto loss = model(x).square().mean();
    loss.backward();
    optimizer.step();
    return loss;
  };
  auto program = ts::compile(step, {.numerics = option});
  std::vector<at::Tensor> results;
  for (int i = 0; i < 3; i++) {
    const ts::NumericsScope scope(scope_numerics);
    const auto x = batch_of(37) * (1 + i);
    results.push_back((compiled ? program(model, optimizer, x) : step(model, optimizer, x)).detach().clone());
  }
  for (const auto& p : model->parameters()) results.push_back(p.detach().clone());
  return results;
}

TEST(InvariantCompiled, StepsHaveTheBitsOfEagerMode) {
  using ts::Numerics;
  const auto expected = train(false, Numerics::Strict, Numerics::Invariant);
  const auto differs = [&](const std::vector<at::Tensor>& found) {
    size_t count = 0;
    for (size_t i = 0; i < found.size(); i++) count += same_bits(found[i], expected[i]) ? 0 : 1;
    return count;
  };
  EXPECT_EQ(differs(train(true, Numerics::Strict, Numerics::Invariant)), 0);  // in a scope
  EXPECT_EQ(differs(train(true, Numerics::Fast, Numerics::Invariant)), 0);    // which takes precedence
  EXPECT_EQ(differs(train(true, Numerics::Invariant, Numerics::Strict)), 0);  // as an option
  EXPECT_GT(differs(train(true, Numerics::Strict, Numerics::Strict)), 0);     // other bits, so the test can fail
}

TEST(InvariantCompiled, TheScopeIsPartOfTheKey) {
  auto step = ts::compile([](const at::Tensor& a, const at::Tensor& b) { return torch::gelu(torch::mm(a, b)); },
                          {.numerics = ts::Numerics::Strict});
  const auto a = torch::sin(torch::arange(7 * 130).view({7, 130}) * 0.1), b = a.t().contiguous().cos();
  const auto plain = step(a, b);
  {
    const ts::NumericsScope scope(ts::Numerics::Invariant);
    EXPECT_FALSE(step.is_cached(a, b));
    EXPECT_TRUE(same_bits(step(a, b), torch::gelu(torch::mm(a, b))));
    EXPECT_CONTAINS(step.listing(), "tessera.tree_product");
    EXPECT_CONTAINS(step.listing(), "tessera.elementwise_gelu");
  }
  EXPECT_TRUE(same_bits(step(a, b), plain));
  EXPECT_EQ(step.cache().size(), 2);
}

TEST(InvariantCompiled, ModulesHaveTheBitsOfEagerMode) {
  const auto gradients = [](bool compiles) {
    ts::models::MLP model(kMLP);
    auto compiled = ts::compile(model);
    const ts::NumericsScope scope(ts::Numerics::Invariant);
    const auto loss = (compiles ? compiled(batch_of(37)) : model(batch_of(37))).square().mean();
    loss.backward();
    std::vector<at::Tensor> found = {loss.detach()};
    for (const auto& p : model->parameters()) found.push_back(p.grad());
    return found;
  };
  const auto eager = gradients(false), compiled = gradients(true);
  for (size_t i = 0; i < eager.size(); i++) EXPECT_TRUE(same_bits(eager[i], compiled[i])) << i;
}

// A lookup in a sharded table is a sum over ranks of which one is nonzero. Each run checks it.
TEST(InvariantCompiled, PlacementsGiveTheBitsOfPlainTensors) {
  at::Tensor expected;
  const auto loss = [](const at::Tensor& table, const at::Tensor& w, const at::Tensor& tokens) {
    const auto rows = torch::embedding(table, tokens);
    return torch::log_softmax(torch::mm(rows, w), 1).sum();
  };
  const auto table = torch::sin(torch::arange(24 * 48).view({24, 48}) * 0.3);
  const auto w = torch::cos(torch::arange(48 * 24).view({48, 24}) * 0.7), tokens = torch::arange(24) * 7 % 24;
  {
    const ts::NumericsScope scope(ts::Numerics::Invariant);
    expected = loss(table, w, tokens);
  }
  for (const int64_t ranks : {2, 3})
    ts::testing::run_ranks(ranks, [&](ts::testing::Rank& me) {
      const auto mesh = me.mesh(c10::str("tp=", ranks));
      const ts::DistributeOptions own{.src_data_rank = std::nullopt};
      auto step = ts::compile(loss, {.numerics = ts::Numerics::Invariant});
      const auto rows = ts::distribute_tensor(table, mesh, {ts::Shard(0)}, own);
      const auto columns = ts::distribute_tensor(w, mesh, {ts::Shard(1)}, own);
      const auto all = ts::distribute_tensor(tokens, mesh, {ts::Replicate()}, own);
      for (int i = 0; i < 2; i++)
        EXPECT_TRUE(same_bits(ts::detail::full_tensor_or_self(step(rows, columns, all)), expected)) << ranks;
    });
}

TEST(InvariantCompiled, WhatHasNoInvariantFormIsRefused) {
  const auto x = torch::ones({4, 4});
  const ts::NumericsScope scope(ts::Numerics::Invariant);
  auto cumulative = ts::compile([](const at::Tensor& x) { return x.cumsum(0); });
  EXPECT_ERROR(ts::UsageError, cumulative(x), "aten::cumsum", "no kernel whose bits");
  auto fast_pass =
      ts::compile([](const at::Tensor& x) { return torch::mm(x, x); }, {.passes = ts::PassList{"fast_products"}});
  EXPECT_ERROR(ts::UsageError, fast_pass(x), "fast_products", "changes the order of sums");
}

TEST(InvariantCompiled, TheFirstStepOfVirtualShardsAtOnceIsRefused) {
  ts::models::MLP model(kMLP);
  ts::VirtualShards shards(*model, {}, 8, ts::VirtualShards::kAll);
  const auto eager = [&shards](ts::models::MLP& model, const at::Tensor& x) {
    model->zero_grad();
    for (int64_t i = 0, passes = shards.local_count(); i < passes; i++) {
      model(shards.rows(x, i)).square().sum().backward();
      shards.add_gradients();
    }
    shards.reduce_gradients();
  };
  auto step = ts::compile(eager, {.captures = ts::Captures::None, .numerics = ts::Numerics::Invariant});
  const auto x = batch_of(16);
  EXPECT_ERROR(ts::UsageError, step(model, x), "make one step without compile() first");
  const ts::NumericsScope scope(ts::Numerics::Invariant);
  eager(model, x);
  const auto expected = model->parameters()[0].grad().clone();
  for (int i = 0; i < 3; i++) {
    step(model, x);
    EXPECT_TRUE(same_bits(model->parameters()[0].grad(), expected));
  }
}

}  // namespace
