#include "tessera/data_parallel/fsdp/summon_full_params.h"

#include "tessera/data_parallel/fsdp/fully_shard.h"
#include "tessera/data_parallel/fsdp/fully_sharded_data_parallel.h"
#include "tessera/debug/comm_debug_mode.h"
#include "tessera/testing/assert_close.h"
#include "tessera/testing/expect_error.h"
#include "tessera/testing/ranks.h"
#include "tests/data_parallel/batches.h"

#include <gtest/gtest.h>

namespace tessera {
namespace {

using comm::Kind;
using data_parallel::batches;
using data_parallel::kExact;
using data_parallel::values_of;
using models::MLP;
using testing::close;
using testing::Rank;
using testing::run_ranks;

const MLP& start() {
  static const MLP it(models::mlp_module());
  return it;
}
const std::vector<std::string> kNames{"net1.weight", "net1.bias", "net2.weight", "net2.bias"};

FSDPOptions flat(ShardingStrategy strategy = ShardingStrategy::FullShard) { return {.sharding_strategy = strategy}; }

TEST(SummonFullParams, ShowsParametersWholeUnderTheirNames) {
  for (const int64_t ranks : {1, 2, 3})
    for (const bool use_orig_params : {false, true})
      run_ranks(ranks, [&](Rank&) {
        auto model = clone(start());
        FullyShardedDataParallel fsdp(model, {.use_orig_params = use_orig_params});
        const auto before = model->named_parameters().keys();
        {
          CommDebugMode comm;
          const SummonFullParams whole(*model, {.writeback = false});
          EXPECT_EQ(model->named_parameters().keys(), kNames);
          EXPECT_EQ(close(values_of(*model), values_of(*start()), kExact), "");
          EXPECT_EQ(comm.get_comm_counts().of(Kind::AllGatherIntoTensor, comm::Family::C10d), ranks > 1);
          EXPECT_EQ(comm.get_total_counts(), ranks > 1);
        }
        EXPECT_EQ(model->named_parameters().keys(), before);
        EXPECT_EQ(before, use_orig_params ? kNames : std::vector<std::string>{"flat_param"});
      });
}

// Changes made by all ranks alike stay, those of an owner alone too; through .data as well.
TEST(SummonFullParams, OwnersChangesStay) {
  for (const auto strategy : {ShardingStrategy::FullShard, ShardingStrategy::NoShard})
    run_ranks(2, [&](Rank& me) {
      const torch::NoGradGuard no_grad;
      auto model = clone(start());
      FullyShardedDataParallel fsdp(model, flat(strategy));
      {
        const SummonFullParams whole(*model);
        model->layers[0]->weight.mul_(2);
        model->layers[1]->bias.data().fill_(7);
        if (strategy == ShardingStrategy::FullShard && me.rank == 1) model->layers[1]->weight[9].fill_(3);
      }
      const SummonFullParams whole(*model);
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
        SummonFullParams whole(*model);
        if (me.rank == 0) model->layers[1]->bias.fill_(7);    // the last parameter: rank 1's
        if (me.rank == 0) model->layers[0]->weight.fill_(7);  // its own
        if (explicitly) whole.close();
      };
      for (const bool explicitly : {true, false})
        EXPECT_ERROR(UsageError, edit(explicitly), "rank 0 changed [0, 10) of parameter net2.bias",
                     "which rank 1 owns");
      const SummonFullParams whole(*model);  // closed as it should be
      EXPECT_EQ(close(model->layers[1]->bias, start()->layers[1]->bias, kExact), "");
      EXPECT_TRUE((model->layers[0]->weight == 7).all().item<bool>());
    }
  });
  run_ranks(2, [](Rank& me) {  // copies that differ
    const torch::NoGradGuard no_grad;
    auto model = clone(start());
    FullyShardedDataParallel fsdp(model, flat(ShardingStrategy::NoShard));
    SummonFullParams whole(*model);
    model->layers[0]->bias.fill_(static_cast<double>(me.rank));
    EXPECT_ERROR(UsageError, whole.close(), "ranks 0 and 1 hold the same part of parameter net1.bias");
  });
}

TEST(SummonFullParams, OnTheFirstRankOnly) {
  run_ranks(3, [](Rank& me) {
    const torch::NoGradGuard no_grad;
    auto model = clone(start());
    FullyShardedDataParallel fsdp(model, {.use_orig_params = true});
    {
      const SummonFullParams whole(*model, {.writeback = false, .rank0_only = true, .offload_to_cpu = true});
      if (me.rank == 0) {
        EXPECT_EQ(close(values_of(*model), values_of(*start()), kExact), "");
      } else {
        EXPECT_EQ(model->layers[0]->weight.dim(), 1);
      }
    }
    const auto write = [&] {
      const SummonFullParams whole(*model, {.writeback = false, .rank0_only = true});
      if (me.rank == 2) model->layers[1]->bias.data().fill_(7);
    };
    EXPECT_ERROR(UsageError, write(), "rank 2 wrote to its piece of parameter net2.bias", "rank0_only");
  });
}

TEST(SummonFullParams, WithGradients) {
  const auto data = batches(2);
  run_ranks(2, [&](Rank& me) {
    auto plain = clone(start()), model = clone(start());
    FullyShardedDataParallel fsdp(model, {.use_orig_params = true});
    data_parallel::accumulate_means(plain, data, data_parallel::square_loss);
    data_parallel::square_loss(model, data[static_cast<size_t>(me.rank)]).backward();
    {
      const SummonFullParams whole(*model);
      for (const auto& p : model->parameters()) EXPECT_FALSE(p.grad().defined());  // pieces do not fit: out of sight
    }
    {
      const SummonFullParams whole(*model, {.with_grads = true});
      EXPECT_EQ(close(data_parallel::gradients_of(*model), data_parallel::gradients_of(*plain)), "");
      for (const auto& p : model->parameters()) p.grad().mul_(3);
    }
    EXPECT_TRUE(fsdp.flat_params()[0].grad().defined());
    const SummonFullParams whole(*model, {.with_grads = true});
    for (size_t i = 0; i < 4; i++)
      EXPECT_EQ(close(model->parameters()[i].grad(), plain->parameters()[i].grad() * 3), "");
  });
}

TEST(SummonFullParams, OneInAnother) {
  run_ranks(2, [](Rank&) {
    const torch::NoGradGuard no_grad;
    models::MLPStacked model(2);
    for (auto& layer : model->layers) FullyShardedDataParallel inner(layer);
    FullyShardedDataParallel fsdp(model);
    const auto& weight = model->layers[0]->layers[0]->weight;
    {
      const SummonFullParams outer(*model, {.recurse = false});  // has no parameters of its own
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
    const SummonFullParams whole(*model);
    EXPECT_TRUE((weight == 7).all().item<bool>());  // the one that opened it writes back
  });
}

TEST(SummonFullParams, AModuleRunsInside) {
  const auto x = batches(1)[0];
  run_ranks(2, [&](Rank&) {
    auto model = clone(start());
    FullyShardedDataParallel fsdp(model, {.mixed_precision = {.param_dtype = at::kBFloat16}});
    const SummonFullParams whole(*model);
    EXPECT_ERROR(UsageError, fsdp(x), "inside of summon_full_params()");
    const torch::NoGradGuard no_grad;
    auto plain = clone(start());
    EXPECT_EQ(close(fsdp(x), plain(x), kExact), "");  // in the dtype that parameters are kept in
    EXPECT_EQ(model->layers[0]->weight.dim(), 2);
  });
}

// As the outermost module's own parameters are asked for, and it is run before anything else was.
TEST(SummonFullParams, AModuleRunsInsideOfItsOwnAlone) {
  const auto x = batches(1)[0];
  run_ranks(2, [&](Rank&) {
    auto plain = clone(start()), model = clone(start());
    FullyShardedDataParallel inner(model->layers[1]);
    FullyShardedDataParallel fsdp(model);
    {
      const SummonFullParams whole(*model, {.recurse = false, .writeback = false});
      const torch::NoGradGuard no_grad;
      EXPECT_EQ(model->layers[0]->weight.dim(), 2);
      EXPECT_EQ(close(fsdp(x), plain(x), kExact), "");
      EXPECT_EQ(model->layers[1]->weight.dim(), 1);
    }
    data_parallel::square_loss(model, x).backward();
    EXPECT_TRUE(fsdp.flat_params()[1].grad().defined());
  });
}

TEST(SummonFullParams, BetweenForwardAndBackward) {
  const auto x = batches(1)[0];
  for (const auto strategy : {ShardingStrategy::FullShard, ShardingStrategy::ShardGradOp})
    run_ranks(2, [&](Rank&) {
      auto plain = clone(start()), model = clone(start());
      FullyShardedDataParallel fsdp(model, flat(strategy));
      auto loss = data_parallel::square_loss(model, x);
      { const SummonFullParams whole(*model); }  // reads only: backward does not mind
      loss.backward();
      data_parallel::square_loss(plain, x).backward();
      const auto wanted = torch::cat({plain->parameters()[0].grad().flatten(), plain->parameters()[1].grad().flatten(),
                                      plain->parameters()[2].grad().flatten(), plain->parameters()[3].grad()});
      EXPECT_EQ(close(fsdp.flat_params()[0].grad(), wanted.chunk(2)[World::current().rank()]), "");
      loss = data_parallel::square_loss(model, x);
      {
        const SummonFullParams whole(*model);
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
    if (in_forward) const SummonFullParams whole(*this);
    auto y = mlp(x);
    if (in_backward) y.register_hook([this](const torch::Tensor&) { const SummonFullParams whole(*this); });
    return y;
  }
  MLP mlp{nullptr};
  bool in_forward = false, in_backward = false;
};
TESSERA_MODULE(Peek);

TEST(SummonFullParams, Refuses) {
  run_ranks(2, [](Rank&) {
    const auto x = batches(1)[0];
    Peek model;
    FullyShardedDataParallel fsdp(model);
    model->in_forward = true;
    EXPECT_ERROR(UsageError, fsdp(x), "summon_full_params(Peek) inside of the forward of Peek");
    model->in_forward = false;
    model->in_backward = true;
    EXPECT_ERROR(UsageError, fsdp(x).sum().backward(), "summon_full_params(Peek) inside of backward");
    EXPECT_ERROR(UsageError, SummonFullParams(*model, {.rank0_only = true}), "summon_full_params(Peek)",
                 "writeback = false");
    EXPECT_ERROR(UsageError, SummonFullParams(*model, {.with_grads = true}), "use_orig_params");
    const SummonFullParams whole(*model);
    EXPECT_EQ(model->mlp->layers[0]->weight.dim(), 2);
  });
}

// fully_shard's parameters, too.
TEST(SummonFullParams, PerParameter) {
  run_ranks(2, [](Rank& me) {
    const torch::NoGradGuard no_grad;
    auto model = clone(start());
    fully_shard(model, {.mesh = me.mesh("dp=2")});
    const auto write = [&](bool all) {
      SummonFullParams whole(*model);
      EXPECT_EQ(model->layers[0]->weight.sizes(), (std::vector<int64_t>{16, 10}));
      if (all || me.rank == 0) model->layers[0]->weight.fill_(7);
      whole.close();
    };
    EXPECT_ERROR(UsageError, write(false), "rank 0 changed [8, 16) of parameter net1.weight");
    write(true);
    const SummonFullParams whole(*model);
    EXPECT_TRUE((model->layers[0]->weight == 7).all().item<bool>());
  });
}

}  // namespace
}  // namespace tessera
