#include "tessera/data_parallel/virtual_shards.h"

#include "tessera/data_parallel/distributed_data_parallel.h"
#include "tessera/data_parallel/fsdp/fully_shard.h"
#include "tessera/data_parallel/fsdp/fully_sharded_data_parallel.h"
#include "tessera/data_parallel/replicate.h"
#include "tessera/dtensor/detail/full_tensor_or_self.h"
#include "tessera/models/mlp.h"
#include "tessera/numerics/numerics.h"
#include "tessera/optim/adam.h"
#include "tessera/testing/expect_error.h"
#include "tessera/testing/ranks.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <mutex>

namespace ts = tessera;

namespace {

enum class Wrapper { None, DDP, Replicate, FullyShard };

const ts::models::MLPConfig kShardedMLP = {
    {{"net1", 12, 33, ts::models::Activation::Sigmoid}, {"net2", 33, 10, ts::models::Activation::None}}, true, 5};

// Bytes of the weights after two steps on this rank of a mesh of data-parallel axes.
std::string train_wrapped(ts::testing::Rank& me, const std::string& axes, Wrapper wrapper, int64_t count,
                          int64_t at_once = 1) {
  const auto mesh = me.mesh(axes);
  ts::models::MLP model(kShardedMLP);
  std::optional<ts::DistributedDataParallel<ts::models::MLP>> ddp;
  if (wrapper == Wrapper::FullyShard) ts::fully_shard(model, {.mesh = mesh});
  if (wrapper == Wrapper::Replicate) {
    ts::ReplicateOptions options;
    options.device_mesh = mesh;
    ts::replicate(model, options);
    ts::replicated(model).set_requires_gradient_sync(false);
  }
  if (wrapper == Wrapper::DDP) ddp.emplace(model);
  ts::optim::AdamW optimizer(model->parameters(), {.lr = 1e-2, .fused = true});
  ts::VirtualShards shards(*model, mesh, count, at_once);
  const int64_t rows = 48 / mesh.size();
  for (int step = 0; step < 3; step++) {
    const auto batch = torch::sin(torch::arange(48 * 12).view({48, 12}) * (0.37 + step));
    const auto mine = batch.narrow(0, shards.first() * 48 / count, rows);
    const ts::NumericsScope scope(ts::Numerics::Invariant);
    optimizer.zero_grad();
    for (int64_t i = 0; i < shards.local_count(); i++) {
      const auto x = shards.rows(mine, i);
      std::optional<ts::data_parallel::NoSync> no_sync;
      if (ddp) no_sync.emplace((*ddp)->no_sync());
      (ddp ? (*ddp)(x) : model(x)).square().sum().backward();
      shards.add_gradients();
    }
    shards.reduce_gradients();
    optimizer.step();
  }
  std::string bytes;
  for (const auto& p : model->parameters()) {
    const auto full = ts::detail::full_tensor_or_self(p.detach()).contiguous();
    bytes.append(static_cast<const char*>(full.const_data_ptr()), full.nbytes());
  }
  return bytes;
}

TEST(VirtualShards, EveryWrapperAndNumberOfRanksGivesTheBitsOfOneRank) {
  for (const int64_t count : {24, 48}) {
    std::string expected;
    ts::testing::run_ranks(1,
                           [&](ts::testing::Rank& me) { expected = train_wrapped(me, "dp=1", Wrapper::None, count); });
    for (const int64_t ranks : {2, 3, 4, 6, 8})
      for (const auto wrapper : {Wrapper::DDP, Wrapper::Replicate, Wrapper::FullyShard})
        ts::testing::run_ranks(ranks, [&](ts::testing::Rank& me) {
          EXPECT_TRUE(train_wrapped(me, c10::str("dp=", ranks), wrapper, count) == expected)
              << ranks << " ranks, wrapper " << static_cast<int>(wrapper);
        });
  }
}

TEST(VirtualShards, VirtualShardsAtOnceHaveTheBitsOfOneByOne) {
  for (const int64_t count : {24, 48}) {
    std::string expected;
    ts::testing::run_ranks(1,
                           [&](ts::testing::Rank& me) { expected = train_wrapped(me, "dp=1", Wrapper::None, count); });
    for (const int64_t ranks : {1, 2, 3, 8})
      for (const int64_t at_once : {int64_t(2), int64_t(5), ts::VirtualShards::kAll})
        ts::testing::run_ranks(ranks, [&](ts::testing::Rank& me) {
          const auto wrapper = ranks == 1 ? Wrapper::None : Wrapper::FullyShard;
          EXPECT_TRUE(train_wrapped(me, c10::str("dp=", ranks), wrapper, count, at_once) == expected)
              << ranks << " ranks, " << at_once << " at once";
        });
  }
}

// One step of 8 virtual shards at once. `loss_of` gives the loss of a pass.
void train_at_once(const std::function<at::Tensor(ts::models::MLP&, const at::Tensor&)>& loss_of,
                   const at::Tensor& factors = torch::ones({16})) {
  ts::models::MLP model(kShardedMLP);
  ts::VirtualShards shards(*model, {}, 8, ts::VirtualShards::kAll);
  const auto batch = torch::sin(torch::arange(16 * 12).view({16, 12}) * 0.37);
  const ts::NumericsScope scope(ts::Numerics::Invariant);
  std::vector<at::Tensor> losses;
  for (int64_t i = 0, passes = shards.local_count(); i < passes; i++) {
    const auto loss = loss_of(model, shards.rows(batch, i));
    losses.push_back(loss.detach() * factors);
    loss.backward();
    shards.add_gradients();
  }
  shards.reduce_gradients();
  shards.sum(torch::stack(losses));
}

TEST(VirtualShards, WhatDependsOnTheNumberAtOnceIsCaught) {
  train_at_once([](auto& model, const auto& x) { return model(x).square().sum(); });
  int number = 0;
  const auto refused = [&](const auto& loss_of, const char* what) {
    SCOPED_TRACE(number++);
    EXPECT_ERROR(ts::UsageError, train_at_once(loss_of), what, "at once");
  };
  // A mean over the rows of a pass, a parameter that is used twice, a sum that is scaled before it is added, rows that
  // are not in the order of the batch, a batch norm.
  refused([](auto& model, const auto& x) { return model(x).square().mean(); }, "other bits than one by one");
  refused([](auto& model, const auto& x) { return model(x).square().sum() + model(x.sin()).sum(); },
          "other bits than one by one");
  EXPECT_ERROR(ts::UsageError,
               train_at_once([](auto& model, const auto& x) { return model(x).square().sum(); }, torch::rand({16})),
               "at once", "multiplied by a number");
  refused(
      [](auto& model, const auto& x) {
        return model(x.view({-1, 2, 12}).transpose(0, 1).reshape({-1, 12})).square().sum();
      },
      "other bits than one by one");
  refused([](auto& model, const auto& x) { return (model(x) - model(x).mean(0)).square().sum(); }, "other bits than");
}

TEST(VirtualShards, ReplicasOfShardsGiveTheBitsOfOneRank) {
  std::string expected;
  ts::testing::run_ranks(1, [&](ts::testing::Rank& me) { expected = train_wrapped(me, "dp=1", Wrapper::None, 24); });
  ts::testing::run_ranks(6, [&](ts::testing::Rank& me) {
    EXPECT_TRUE(train_wrapped(me, "dp=3,fsdp=2", Wrapper::FullyShard, 24) == expected);
  });
}

TEST(VirtualShards, AReductionOfTheWrapperIsRefused) {
  ts::testing::run_ranks(2, [](ts::testing::Rank& me) {
    const auto mesh = me.mesh("dp=2");
    for (const bool sharded : {false, true}) {
      ts::models::MLP model(kShardedMLP);
      ts::ReplicateOptions options;
      options.device_mesh = mesh;
      if (sharded)
        ts::fully_shard(model, {.mesh = mesh});
      else
        ts::replicate(model, options);
      model(torch::ones({2, 12}));  // one-time setup
      const ts::NumericsScope scope(ts::Numerics::Invariant);
      auto loss = model(torch::ones({2, 12}) + me.rank).sum();
      EXPECT_ERROR(ts::UsageError, loss.backward(), "Numerics::Invariant", "VirtualShards");
    }
  });
}

TEST(VirtualShards, MisuseIsRefused) {
  ts::testing::run_ranks(2, [](ts::testing::Rank& me) {
    const auto mesh = me.mesh("dp=2");
    ts::models::MLP model(kShardedMLP);
    EXPECT_ERROR(ts::UsageError, ts::VirtualShards(*model, mesh, 23), "23 virtual shards on 2 ranks");
    ts::VirtualShards shards(*model, mesh, 2);
    EXPECT_ERROR(ts::UsageError, shards.add_gradients(), "net1.weight", "no gradient");
    EXPECT_ERROR(ts::UsageError, shards.reduce_gradients(), "0 of 1 virtual shards");
    model(torch::ones({2, 12})).sum().backward();
    shards.add_gradients();
    EXPECT_ERROR(ts::UsageError, shards.add_gradients(), "call reduce_gradients()");
    shards.reduce_gradients();
    model(torch::ones({2, 12})).sum().backward();  // without zero_grad()
    EXPECT_ERROR(ts::UsageError, shards.add_gradients(), "call zero_grad()");
    EXPECT_ERROR(ts::UsageError, ts::VirtualShards(*model, mesh, 6).rows(torch::ones({4, 12}), 0),
                 "multiple of 6 rows");
    ts::models::MLP flat(kShardedMLP);
    const ts::FullyShardedDataParallel wrapped(flat);
    EXPECT_ERROR(ts::UsageError, ts::VirtualShards(*flat, mesh), "use fully_shard()");
  });
}

// Dropout on a plain tensor has other masks than on a shard.
TEST(VirtualShards, RandomNumbersOfPlainTensorsAreRefused) {
  const ts::NumericsScope scope(ts::Numerics::Invariant);
  EXPECT_ERROR(ts::UsageError, torch::dropout(torch::ones({4, 4}), 0.5, true), "LibTorch's generator");
}

}  // namespace
