// The memory of a step of sharded training is as predicted. Ranks are processes: each counts its own allocations.
#include "tessera/data_parallel/fsdp/fully_shard.h"
#include "tessera/data_parallel/fsdp/fully_sharded_data_parallel.h"
#include "tessera/models/gpt2.h"
#include "tessera/models/loss.h"
#include "tessera/optim/adam.h"
#include "tessera/testing/detail/step_memory.h"
#include "tessera/testing/spawn.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

namespace tessera {
namespace {

using models::GPT2;
using testing::CountingAllocator;
using testing::Rank;
using testing::StepMemory;

// Eight groups of 0.8 MB. Other allocations are small compared with that.
const models::GPT2Config kConfig{.vocab_size = 64, .max_seq_len = 8, .n_layer = 8, .n_head = 2, .n_embd = 128};

int64_t numel_of(const torch::nn::Module& module) {
  int64_t total = 0;
  for (const auto& p : module.parameters()) total += p.numel();
  return total;
}

StepMemory third_step(CountingAllocator& count, GPT2& model) {
  const auto tokens = torch::randint(kConfig.vocab_size, {1, 5}, torch::kLong);
  optim::AdamW optimizer(model->parameters(), {.fused = true});
  StepMemory found;
  for (int step = 0; step < 3; step++) {
    optimizer.zero_grad();
    found = testing::measure_step(
        count, [&] { return models::loss(model(tokens.narrow(1, 0, 4)), tokens.narrow(1, 1, 4)); },
        [&] { optimizer.step(); });
  }
  return found;
}

// shard(module, keep): with keep, groups stay unsharded from forward to backward.
template <class Shard>
void check(Rank& me, Shard shard) {
  StepMemory plain;
  testing::UnitSizes sizes;
  {
    CountingAllocator count;
    GPT2 model(kConfig);
    sizes = {numel_of(*model), numel_of(*model), numel_of(*model->h[0])};
    sizes.root -= kConfig.n_layer * sizes.largest;
    plain = third_step(count, model);
  }
  const auto prediction = testing::memory_bound(sizes, me.size(), plain.forward - plain.before);
  for (const bool keep : {false, true}) {
    CountingAllocator count;
    GPT2 model(kConfig);
    for (auto& block : model->h) shard(block, keep);
    shard(model, keep);
    const auto found = third_step(count, model);
    const int64_t all_gathered = keep && me.size() > 1 ? 4 * (sizes.all - sizes.root) - prediction.gathered : 0;
    EXPECT_LE(found.peak(), 1.05 * static_cast<double>(prediction.total() + all_gathered)) << prediction;
    // After forward only the root is unsharded. After the step no group is.
    const double slack = 0.05 * static_cast<double>(prediction.state);
    EXPECT_NEAR(found.after, prediction.state, slack);
    if (!keep) {
      const auto kept = 0.75 * static_cast<double>(prediction.state);  // no gradients
      EXPECT_LE(found.after_forward, kept + static_cast<double>(prediction.root + prediction.activations) + slack);
    }
  }
}

const auto kFullyShard = [](auto& module, bool keep) { fully_shard(module, {.reshard_after_forward = !keep}); };
const auto kFlat = [](auto& module, bool keep) {
  FullyShardedDataParallel(module,
                           {.sharding_strategy = keep ? ShardingStrategy::ShardGradOp : ShardingStrategy::FullShard});
};

TEST(FsdpMemory, IsAsPredicted) {
  for (const int64_t ranks : {1, 2})
    testing::spawn_ranks(ranks,
                         [](Rank& me) {
                           check(me, kFullyShard);
                           check(me, kFlat);
                         },
                         {.backend = "shm"});
}

}  // namespace
}  // namespace tessera
