// Time of a train step (forward, backward, optimizer) with DistributedDataParallel: an MLP (10 -> 16 -> 10, batch 8)
// and a small GPT (peer_gpt.h, batch 4 x 128 per rank). Both sides use LibTorch's modules. Plain runs one independent
// copy per rank at the same time, so both sides have the same cores and the difference is the cost of averaging
// gradients. Variants: ddp has the default options and LibTorch's AdamW; ddp_view has gradient_as_bucket_view;
// ddp_fused has that and the fused AdamW, on both sides.
//
// The note has the fraction of the collectives' time that backward hides, and the time that is not hidden. The fraction
// alone is too optimistic: a bucket that completes early counts as in flight until the wait. See comm_wait.h.
#include "benchmarks/comm_wait.h"
#include "benchmarks/harness/bench.h"
#include "benchmarks/harness/process_ranks.h"
#include "benchmarks/peer_gpt.h"
#include "benchmarks/peer_mlp.h"
#include "benchmarks/peer_steps.h"
#include "tessera/data_parallel/distributed_data_parallel.h"

#include <cmath>
#include <iomanip>
#include <memory>
#include <sstream>

namespace tessera::bench {
namespace ddp_bench {
namespace {

using Mlp = PeerMlp;
using Gpt = PeerGpt<TorchLayers>;

template <class Model>
auto ddp(bool gradient_as_bucket_view) {
  return DistributedDataParallel(std::make_shared<Model>(), {.gradient_as_bucket_view = gradient_as_bucket_view});
}

struct Case {
  StepCase step;
  Optimizer optimizer;
  bool view;
  Step (*ours)(const Case& c, int64_t rank);
  Step (*plain)(const Case& c, int64_t rank);
};
Step mlp_ours(const Case& c, int64_t rank) { return mlp_step(ddp<Mlp>(c.view), c.optimizer, rank); }
Step mlp_plain(const Case& c, int64_t rank) { return mlp_step(std::make_shared<Mlp>(), c.optimizer, rank); }
Step gpt_ours(const Case& c, int64_t rank) { return gpt_step(ddp<Gpt>(c.view), c.optimizer, rank); }
Step gpt_plain(const Case& c, int64_t rank) { return gpt_step(std::make_shared<Gpt>(), c.optimizer, rank); }

constexpr Case kCases[] = {
    {{"mlp", "ddp", 300}, Optimizer::Torch, false, mlp_ours, mlp_plain},
    {{"gpt", "ddp", 2}, Optimizer::Torch, false, gpt_ours, gpt_plain},
    {{"mlp", "ddp_view", 300}, Optimizer::Torch, true, mlp_ours, mlp_plain},
    {{"gpt", "ddp_view", 2}, Optimizer::Torch, true, gpt_ours, gpt_plain},
    {{"mlp", "ddp_fused", 300}, Optimizer::Fused, true, mlp_ours, mlp_plain},
    {{"gpt", "ddp_fused", 2}, Optimizer::Fused, true, gpt_ours, gpt_plain},
};

std::string overlap_note(const Step& step) {
  const auto wait = measure_comm_wait(step);
  std::ostringstream text;
  text << std::lround(100 * wait.hidden_fraction) << "% hidden behind backward, " << std::setprecision(3)
       << wait.waiting_ms << " ms waited for";
  return text.str();
}

void run(int64_t ranks, const EmitRow& emit) {
  run_process_ranks("ddp", ranks, emit, [&](testing::Rank& me, const EmitRow& emit) {
    for (const auto& c : kCases) emit_step_row(me, c.step, c.ours(c, me.rank), c.plain(c, me.rank), emit, overlap_note);
  });
}

}  // namespace
}  // namespace ddp_bench

void register_ddp(BenchRegistry& registry) {
  registry.add({"ddp", "train step with DistributedDataParallel", [](const EmitRow& emit) {
                  ddp_bench::run(2, emit);
                  ddp_bench::run(4, emit);
                }});
}

}  // namespace tessera::bench
