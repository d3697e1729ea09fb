#include "tessera/data_parallel/fsdp/fully_sharded_data_parallel.h"

#include "tessera/optim/sgd.h"
#include "tessera/testing/assert_close.h"
#include "tessera/testing/message_of.h"
#include "tessera/testing/ranks.h"
#include "tests/data_parallel/batches.h"

#include <gtest/gtest.h>

namespace tessera {
namespace {

using data_parallel::batches;
using data_parallel::square_loss;
using data_parallel::values_of;
using models::MLP;
using testing::close;
using testing::Rank;
using testing::run_ranks;

// Every strategy, from parameters that differ until the first rank's are taken, with a pass that is not synchronised.
TEST(FullyShardedDataParallel, TrainsLikeThePlainModule) {
  const MLP start(models::mlp_module());
  const auto data = batches(4);
  for (const auto strategy : {ShardingStrategy::FullShard, ShardingStrategy::ShardGradOp, ShardingStrategy::NoShard,
                              ShardingStrategy::HybridShard, ShardingStrategy::HybridShardZero2})
    for (const bool use_orig_params : {false, true}) {
      SCOPED_TRACE(c10::str(strategy, use_orig_params));
      run_ranks(4, [&](Rank& me) {
        auto plain = clone(start), model = clone(start);
        if (me.rank > 0) model->layers[0]->weight.data().fill_(static_cast<double>(me.rank));
        const bool hybrid = strategy == ShardingStrategy::HybridShard || strategy == ShardingStrategy::HybridShardZero2;
        FullyShardedDataParallel fsdp(model, {.device_mesh = me.mesh(hybrid ? "replicate=2,shard=2" : "dp=4"),
                                              .sharding_strategy = strategy,
                                              .use_orig_params = use_orig_params,
                                              .sync_module_states = true});
        optim::SGD plain_opt(plain->parameters(), {.lr = 0.5}), opt(fsdp->parameters(), {.lr = 0.5});
        for (int step = 0; step < 3; step++) {
          plain_opt.zero_grad();
          opt.zero_grad();
          const auto& batch = data[static_cast<size_t>(me.rank)];
          if (step == 1) {
            const auto guard = fsdp.no_sync();
            fsdp(batch).pow(2).mean().backward();
          }
          fsdp(batch).pow(2).mean().backward();
          for (int i = 0; i < (step == 1 ? 2 : 1); i++)
            for (const auto& x : data) (square_loss(plain, x) / 4).backward();
          plain_opt.step();
          opt.step();
        }
        const SummonFullParams whole(*model);
        EXPECT_EQ(close(values_of(*model), values_of(*plain)), "");
      });
    }
}

TEST(FullyShardedDataParallel, WritesToWholeParametersStayIfAsked) {
  const MLP start(models::mlp_module());
  run_ranks(2, [&](Rank&) {
    auto model = clone(start);
    FullyShardedDataParallel fsdp(model);
    for (const bool writeback : {false, true}) {
      {
        const SummonFullParams whole(*model, {.writeback = writeback});
        const torch::NoGradGuard no_grad;
        model->layers[0]->weight.fill_(7);
      }
      const SummonFullParams whole(*model);
      EXPECT_EQ((model->layers[0]->weight == 7).all().item<bool>(), writeback);
    }
  });
}

TEST(FullyShardedDataParallel, Refuses) {
  run_ranks(2, [](Rank&) {
    MLP model(models::mlp_module());
    EXPECT_ERROR(UsageError, FullyShardedDataParallel(model, {.sharding_strategy = ShardingStrategy::HybridShard}),
                 "HYBRID_SHARD needs a device_mesh of two axes");
    FullyShardedDataParallel fsdp(model);
    EXPECT_ERROR(UsageError, FullyShardedDataParallel(model), "is sharded already");
  });
}

}  // namespace
}  // namespace tessera
