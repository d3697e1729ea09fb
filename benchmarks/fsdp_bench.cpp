// Time of a train step (forward, backward, optimizer) with sharded parameters: an MLP (10 -> 16 -> 10, batch 8) as one
// FSDP unit, and a small GPT (peer_gpt.h, batch 4 x 128 per rank) with one unit per block and one for the rest. Plain
// runs one independent LibTorch copy per rank at the same time, so both sides have the same cores. The variants
// fully_shard and fsdp (FullyShardedDataParallel with use_orig_params) have LibTorch's AdamW, those with _fused its
// fused kernel, on both sides.
//
// The note has the time that a step waits for collectives.
#include "benchmarks/comm_wait.h"
#include "benchmarks/harness/bench.h"
#include "benchmarks/harness/process_ranks.h"
#include "benchmarks/peer_gpt.h"
#include "benchmarks/peer_mlp.h"
#include "benchmarks/peer_steps.h"
#include "tessera/data_parallel/fsdp/fully_shard.h"
#include "tessera/data_parallel/fsdp/fully_sharded_data_parallel.h"
#include "tessera/models/mlp.h"

#include <iomanip>
#include <memory>
#include <sstream>

namespace tessera::bench {
namespace fsdp_bench {
namespace {

using Gpt = Holder<PeerGpt<TesseraLayers>>;
using PlainGpt = PeerGpt<TorchLayers>;

// How a module is sharded. Called for inner modules first.
struct FullyShard {
  template <class H>
  static void apply(H& module) {
    fully_shard(module);
  }
};
struct Fsdp1 {
  template <class H>
  static void apply(H& module) {
    FullyShardedDataParallel(module, {.use_orig_params = true});  // its hooks stay on the module
  }
};

template <class Sharding>
Step mlp_ours(Optimizer optimizer, int64_t rank) {
  models::MLP model(models::mlp_module());
  Sharding::apply(model);
  return mlp_step(model, optimizer, rank);
}
template <class Sharding>
Step gpt_ours(Optimizer optimizer, int64_t rank) {
  Gpt model;
  for (auto& block : model->blocks) Sharding::apply(block);
  Sharding::apply(model);
  return gpt_step(model, optimizer, rank);
}
Step mlp_plain(Optimizer optimizer, int64_t rank) { return mlp_step(std::make_shared<PeerMlp>(), optimizer, rank); }
Step gpt_plain(Optimizer optimizer, int64_t rank) { return gpt_step(std::make_shared<PlainGpt>(), optimizer, rank); }

struct Case {
  StepCase step;
  Optimizer optimizer;
  Step (*ours)(Optimizer optimizer, int64_t rank);
  Step (*plain)(Optimizer optimizer, int64_t rank);
};
constexpr Case kCases[] = {
    {{"mlp", "fully_shard", 300}, Optimizer::Torch, mlp_ours<FullyShard>, mlp_plain},
    {{"gpt", "fully_shard", 2}, Optimizer::Torch, gpt_ours<FullyShard>, gpt_plain},
    {{"mlp", "fsdp", 300}, Optimizer::Torch, mlp_ours<Fsdp1>, mlp_plain},
    {{"gpt", "fsdp", 2}, Optimizer::Torch, gpt_ours<Fsdp1>, gpt_plain},
    {{"mlp", "fully_shard_fused", 300}, Optimizer::Fused, mlp_ours<FullyShard>, mlp_plain},
    {{"gpt", "fully_shard_fused", 2}, Optimizer::Fused, gpt_ours<FullyShard>, gpt_plain},
};

std::string wait_note(const Step& step) {
  std::ostringstream text;
  text << std::setprecision(3) << measure_comm_wait(step).waiting_ms << " ms in collectives";
  return text.str();
}

void run(int64_t ranks, const EmitRow& emit) {
  run_process_ranks("fsdp", ranks, emit, [&](testing::Rank& me, const EmitRow& emit) {
    for (const auto& c : kCases)
      emit_step_row(me, c.step, c.ours(c.optimizer, me.rank), c.plain(c.optimizer, me.rank), emit, wait_note);
  });
}

}  // namespace
}  // namespace fsdp_bench

void register_fsdp(BenchRegistry& registry) {
  registry.add({"fsdp", "train step with fully_shard and FullyShardedDataParallel", [](const EmitRow& emit) {
                  fsdp_bench::run(2, emit);
                  fsdp_bench::run(4, emit);
                }});
}

}  // namespace tessera::bench
