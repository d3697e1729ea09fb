#include "tessera/data_parallel/fsdp/summon_full_params.h"

#include "tessera/data_parallel/fsdp/fully_shard.h"
#include "tessera/data_parallel/fsdp/fully_sharded_data_parallel.h"
#include "tessera/debug/comm_debug_mode.h"
#include "tessera/testing/assert_close.h"
#include "tessera/testing/expect_error.h"
#include "tessera/testing/ranks.h"
#include "tests/fixtures/data_parallel.h"

#include <gtest/gtest.h>

namespace tessera {
namespace {

using namespace fixtures;
using comm::CommKind;

const MLP& start() {
  static const MLP it(models::mlp_module());
  return it;
}
const std::vector<std::string> kNames{"net1.weight", "net1.bias", "net2.weight", "net2.bias"};

FSDPOptions flat(ShardingStrategy strategy = ShardingStrategy::FullShard) { return {.sharding_strategy = strategy}; }

TEST(SummonFullParams, ParametersAreUnshardedUnderTheirNames) {
  for (const int64_t ranks : {1, 2, 3})
    for (const bool use_orig_params : {false, true})
      run_ranks(ranks, [&](Rank&) {
        auto model = clone(start());
        FullyShardedDataParallel fsdp(model, {.use_orig_params = use_orig_params});
        const auto before = model->named_parameters().keys();
        {
          CommDebugMode comm;
          const SummonFullParams full(*model, {.writeback = false});
          EXPECT_EQ(model->named_parameters().keys(), kNames);
          EXPECT_EQ(close(values_of(*model), values_of(*start()), kExact), "");
          EXPECT_EQ(comm.get_comm_counts().of(CommKind::AllGatherIntoTensor, comm::Family::C10d), ranks > 1);
          EXPECT_EQ(comm.get_total_counts(), ranks > 1);
        }
        EXPECT_EQ(model->named_parameters().keys(), before);
        EXPECT_EQ(before, use_orig_params ? kNames : std::vector<std::string>{"flat_param"});
      });
}

// Changes that all ranks make stay, and those that only the owner makes; also through .data.
TEST(SummonFullParams, ChangesOfTheOwnerStay) {
  for (const auto strategy : {ShardingStrategy::FullShard, ShardingStrategy::NoShard})
    run_ranks(2, [&](Rank& me) {
      const torch::NoGradGuard no_grad;
      auto model = clone(start());
      FullyShardedDataParallel fsdp(model, flat(strategy));
      {
        const SummonFullParams full(*model);
        model->layers[0]->weight.mul_(2);
        model->layers[1]->bias.data().fill_(7);
        if (strategy == ShardingStrategy::FullShard && me.rank == 1) model->layers[1]->weight[9].fill_(3);
      }
      const SummonFullParams full(*model);
      EXPECT_EQ(close(model->layers[0]->weight, start()->layers[0]->weight * 2, kExact), "");
      EXPECT_TRUE((model->layers[1]->bias == 7).all().item<bool>());
      EXPECT_EQ((model->layers[1]->weight[9] == 3).all().item<bool>(), strategy == ShardingStrategy::FullShard);
    });
}

TEST(SummonFullParams, AChangeThatTheOwnerDidNotMakeIsAnError) {
  run_ranks(2, [](Rank& me) {
    const torch::NoGradGuard no_grad;
    for (const bool use_orig_params : {false, true}) {
      auto model = clone(start());
      FullyShardedDataParallel fsdp(model, {.use_orig_params = use_orig_params});
      const auto edit = [&](bool explicitly) {
        SummonFullParams full(*model);
        if (me.rank == 0) model->layers[1]->bias.fill_(7);    // owned by rank 1
        if (me.rank == 0) model->layers[0]->weight.fill_(7);  // owned by rank 0
        if (explicitly) full.close();
      };
      for (const bool explicitly : {true, false})
        EXPECT_ERROR(UsageError, edit(explicitly), "rank 0 changed [0, 10) of parameter net2.bias",
                     "which rank 1 owns");
      const SummonFullParams full(*model);  // the one before is closed
      EXPECT_EQ(close(model->layers[1]->bias, start()->layers[1]->bias, kExact), "");
      EXPECT_TRUE((model->layers[0]->weight == 7).all().item<bool>());
    }
  });
  run_ranks(2, [](Rank& me) {  // replicas that differ
    const torch::NoGradGuard no_grad;
    auto model = clone(start());
    FullyShardedDataParallel fsdp(model, flat(ShardingStrategy::NoShard));
    SummonFullParams full(*model);
    model->layers[0]->bias.fill_(static_cast<double>(me.rank));
    EXPECT_ERROR(UsageError, full.close(), "ranks 0 and 1 are replicas with the same shard of parameter net1.bias");
  });
}

TEST(SummonFullParams, OnRank0Only) {
  run_ranks(3, [](Rank& me) {
    const torch::NoGradGuard no_grad;
    auto model = clone(start());
    FullyShardedDataParallel fsdp(model, {.use_orig_params = true});
    {
      const SummonFullParams full(*model, {.writeback = false, .rank0_only = true, .offload_to_cpu = true});
      if (me.rank == 0) {
        EXPECT_EQ(close(values_of(*model), values_of(*start()), kExact), "");
      } else {
        EXPECT_EQ(model->layers[0]->weight.dim(), 1);
      }
    }
    const auto write = [&] {
      const SummonFullParams full(*model, {.writeback = false, .rank0_only = true});
      if (me.rank == 2) model->layers[1]->bias.data().fill_(7);
    };
    EXPECT_ERROR(UsageError, write(), "rank 2 wrote to its shard of parameter net2.bias", "rank0_only");
  });
}

TEST(SummonFullParams, WithGradients) {
  const auto data = batches(2);
  run_ranks(2, [&](Rank& me) {
    auto plain = clone(start()), model = clone(start());
    FullyShardedDataParallel fsdp(model, {.use_orig_params = true});
    accumulate_means(plain, data, square_loss);
    square_loss(model, data[static_cast<size_t>(me.rank)]).backward();
    {
      const SummonFullParams full(*model);
      for (const auto& p : model->parameters()) EXPECT_FALSE(p.grad().defined());  // sharded gradients are hidden
    }
    {
      const SummonFullParams full(*model, {.with_grads = true});
      EXPECT_EQ(close(gradients_of(*model), gradients_of(*plain)), "");
      for (const auto& p : model->parameters()) p.grad().mul_(3);
    }
    EXPECT_TRUE(fsdp->flat_params()[0].grad().defined());
    const SummonFullParams full(*model, {.with_grads = true});
    for (size_t i = 0; i < 4; i++)
      EXPECT_EQ(close(model->parameters()[i].grad(), plain->parameters()[i].grad() * 3), "");
  });
}

TEST(SummonFullParams, Nested) {
  run_ranks(2, [](Rank&) {
    const torch::NoGradGuard no_grad;
    models::MLPStacked model(2);
    for (auto& layer : model->layers) FullyShardedDataParallel inner(layer);
    FullyShardedDataParallel fsdp(model);
    const auto& weight = model->layers[0]->layers[0]->weight;
    {
      const SummonFullParams outer(*model, {.recurse = false});  // the root group has no parameters
      EXPECT_EQ(weight.dim(), 1);
      {
        const SummonFullParams inner(*model->layers[0]);
        EXPECT_EQ(weight.dim(), 2);
        {
          const SummonFullParams again(*model, {.writeback = false});
          EXPECT_EQ(model->layers[1]->layers[0]->weight.dim(), 2);
          weight.fill_(7);
        }
        EXPECT_EQ(weight.dim(), 2);
        EXPECT_EQ(model->layers[1]->layers[0]->weight.dim(), 1);
        EXPECT_EQ(model->layers[0]->named_parameters().keys(), kNames);
      }
      EXPECT_EQ(weight.dim(), 1);
    }
    const SummonFullParams full(*model);
    EXPECT_TRUE((weight == 7).all().item<bool>());  // the one that unsharded it writes back
  });
}

TEST(SummonFullParams, AModuleRunsInside) {
  const auto x = batches(1)[0];
  run_ranks(2, [&](Rank&) {
    auto model = clone(start());
    FullyShardedDataParallel fsdp(model, {.mixed_precision = {.param_dtype = at::kBFloat16}});
    const SummonFullParams full(*model);
    EXPECT_ERROR(UsageError, fsdp(x), "inside summon_full_params()");
    const torch::NoGradGuard no_grad;
    auto plain = clone(start());
    EXPECT_EQ(close(fsdp(x), plain(x), kExact), "");  // in the dtype of the shards
    EXPECT_EQ(model->layers[0]->weight.dim(), 2);
  });
}

// Only the root's parameters are unsharded, and the model runs for the first time.
TEST(SummonFullParams, AModuleRunsInsideWithoutRecurse) {
  const auto x = batches(1)[0];
  run_ranks(2, [&](Rank&) {
    auto plain = clone(start()), model = clone(start());
    FullyShardedDataParallel inner(model->layers[1]);
    FullyShardedDataParallel fsdp(model);
    {
      const SummonFullParams full(*model, {.recurse = false, .writeback = false});
      const torch::NoGradGuard no_grad;
      EXPECT_EQ(model->layers[0]->weight.dim(), 2);
      EXPECT_EQ(close(fsdp(x), plain(x), kExact), "");
      EXPECT_EQ(model->layers[1]->weight.dim(), 1);
    }
    square_loss(model, x).backward();
    EXPECT_TRUE(fsdp->flat_params()[1].grad().defined());
  });
}

TEST(SummonFullParams, BetweenForwardAndBackward) {
  const auto x = batches(1)[0];
  for (const auto strategy : {ShardingStrategy::FullShard, ShardingStrategy::ShardGradOp})
    run_ranks(2, [&](Rank&) {
      auto plain = clone(start()), model = clone(start());
      FullyShardedDataParallel fsdp(model, flat(strategy));
      auto loss = square_loss(model, x);
      { const SummonFullParams full(*model); }  // only reads: backward still works
      loss.backward();
      square_loss(plain, x).backward();
      const auto wanted = torch::cat({plain->parameters()[0].grad().flatten(), plain->parameters()[1].grad().flatten(),
                                      plain->parameters()[2].grad().flatten(), plain->parameters()[3].grad()});
      EXPECT_EQ(close(fsdp->flat_params()[0].grad(), wanted.chunk(2)[World::current().rank()]), "");
      loss = square_loss(model, x);
      {
        const SummonFullParams full(*model);
        const torch::NoGradGuard no_grad;
        model->layers[1]->weight.mul_(2);
      }
      EXPECT_ERROR(UsageError, loss.backward(), "was modified between the forward and the backward");
    });
}

struct PeekImpl : torch::nn::Cloneable<PeekImpl> {
  PeekImpl() { reset(); }
  void reset() override { mlp = register_module("mlp", MLP(models::mlp_module())); }
  torch::Tensor forward(torch::Tensor x) {
    if (in_forward) const SummonFullParams full(*this);
    auto y = mlp(x);
    if (in_backward) y.register_hook([this](const torch::Tensor&) { const SummonFullParams full(*this); });
    return y;
  }
  MLP mlp{nullptr};
  bool in_forward = false, in_backward = false;
};
TESSERA_MODULE(Peek);

TEST(SummonFullParams, Errors) {
  run_ranks(2, [](Rank&) {
    const auto x = batches(1)[0];
    Peek model;
    FullyShardedDataParallel fsdp(model);
    model->in_forward = true;
    EXPECT_ERROR(UsageError, fsdp(x), "summon_full_params(Peek) inside the forward of Peek");
    model->in_forward = false;
    model->in_backward = true;
    EXPECT_ERROR(UsageError, fsdp(x).sum().backward(), "summon_full_params(Peek) inside backward");
    EXPECT_ERROR(UsageError, SummonFullParams(*model, {.rank0_only = true}), "summon_full_params(Peek)",
                 "writeback = false");
    EXPECT_ERROR(UsageError, SummonFullParams(*model, {.with_grads = true}), "use_orig_params");
    const SummonFullParams full(*model);
    EXPECT_EQ(model->mlp->layers[0]->weight.dim(), 2);
  });
}

// With fully_shard.
TEST(SummonFullParams, PerParameter) {
  run_ranks(2, [](Rank& me) {
    const torch::NoGradGuard no_grad;
    auto model = clone(start());
    fully_shard(model, {.mesh = me.mesh("dp=2")});
    const auto write = [&](bool all) {
      SummonFullParams full(*model);
      EXPECT_EQ(model->layers[0]->weight.sizes(), (std::vector<int64_t>{16, 10}));
      if (all || me.rank == 0) model->layers[0]->weight.fill_(7);
      full.close();
    };
    EXPECT_ERROR(UsageError, write(false), "rank 0 changed [8, 16) of parameter net1.weight");
    write(true);
    const SummonFullParams full(*model);
    EXPECT_TRUE((model->layers[0]->weight == 7).all().item<bool>());
  });
}

}  // namespace
}  // namespace tessera
