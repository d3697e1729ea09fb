// Peak memory of a train step per rank (forward, backward, AdamW), as the CPU allocator counts it: a GPT-2 with 100
// million parameters, one FSDP unit per block and one for the rest, on 1, 2 and 4 processes. Plain is the unsharded
// model. The note has the promised peak, which the measured one may exceed by 5 %, and the peaks of forward, backward
// and optimizer.
#include "benchmarks/harness/bench.h"
#include "benchmarks/harness/process_ranks.h"
#include "tessera/data_parallel/fsdp/fully_shard.h"
#include "tessera/data_parallel/fsdp/fully_sharded_data_parallel.h"
#include "tessera/models/gpt2.h"
#include "tessera/models/loss.h"
#include "tessera/optim/adam.h"
#include "tessera/testing/detail/step_memory.h"

#include <ATen/ops/randint.h>

#include <cmath>
#include <sstream>

namespace tessera::bench {
namespace memory_bench {
namespace {

using models::GPT2;
using testing::CountingAllocator;
using testing::StepMemory;

const models::GPT2Config kConfig{.vocab_size = 1024, .max_seq_len = 64, .n_layer = 14, .n_head = 12, .n_embd = 768};

int64_t numel_of(const std::vector<at::Tensor>& parameters) {
  int64_t total = 0;
  for (const auto& p : parameters) total += p.numel();
  return total;
}

// Measures the second step. The first one creates the optimizer state.
StepMemory second_step(CountingAllocator& count, GPT2& model) {
  const auto tokens = at::randint(kConfig.vocab_size, {1, 9}, at::kLong);
  optim::AdamW optimizer(model->parameters(), {.lr = 1e-4, .fused = true});
  StepMemory found;
  for (int step = 0; step < 2; step++) {
    optimizer.zero_grad();
    found = testing::measure_step(
        count, [&] { return models::loss(model(tokens.narrow(1, 0, 8)), tokens.narrow(1, 1, 8)); },
        [&] { optimizer.step(); });
  }
  return found;
}

struct ShardingVariant {
  const char* name;
  void (*shard)(GPT2& model);
};
const ShardingVariant kVariants[] = {
    {"fully_shard",
     [](GPT2& model) {
       for (auto& block : model->h) fully_shard(block);
       fully_shard(model);
     }},
    {"fsdp",
     [](GPT2& model) {
       for (auto& block : model->h) FullyShardedDataParallel(block, {.use_orig_params = true});
       FullyShardedDataParallel(model, {.use_orig_params = true});
     }},
};

double mb(int64_t bytes) { return std::round(static_cast<double>(bytes) * 1e-5) / 10; }

void run(int64_t ranks, const EmitRow& emit) {
  run_process_ranks("memory", ranks, emit, [&](testing::Rank& me, const EmitRow& emit) {
    StepMemory plain;
    testing::UnitSizes sizes;
    {
      CountingAllocator count;
      GPT2 model(kConfig);
      sizes = {numel_of(model->parameters()), numel_of(model->parameters()), numel_of(model->h[0]->parameters())};
      for (auto& block : model->h) sizes.root -= numel_of(block->parameters());
      plain = second_step(count, model);
    }
    const auto promise = testing::memory_bound(sizes, ranks, plain.forward - plain.before);
    for (const auto& variant : kVariants) {
      CountingAllocator count;
      GPT2 model(kConfig);
      variant.shard(model);
      const auto found = second_step(count, model);
      std::ostringstream note;
      note << "promised " << promise << "; " << mb(found.forward) << ", " << mb(found.backward) << ", "
           << mb(found.optimizer) << " in forward, backward, optimizer";
      if (me.rank == 0)
        emit({.name = c10::str("gpt2-100m/", ranks, "/-/", variant.name),
              .unit = "MB",
              .ours = mb(found.peak()),
              .plain = mb(plain.peak()),
              .note = note.str()});
    }
  });
}

}  // namespace
}  // namespace memory_bench

void register_memory(BenchRegistry& registry) {
  registry.add({"memory", "peak memory of a sharded train step per rank", [](const EmitRow& emit) {
                  for (const int64_t ranks : {1, 2, 4}) memory_bench::run(ranks, emit);
                }});
}

}  // namespace tessera::bench
