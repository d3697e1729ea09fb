// One step of training (forward, backward, optimizer) with data parallelism: the seeds' MLP (10 -> 16 -> 10, batch 8)
// and a small GPT (peer_gpt.h, batch 4 x 128 a rank). Both sides are LibTorch's modules; plain is as many independent
// copies at once as there are ranks, so that both have the same cores and what is left is what averaging costs. The
// variant ddp has the defaults and LibTorch's AdamW; ddp_view gradient_as_bucket_view, which spares a copy; ddp_fused
// that and the fused AdamW, on both sides.
//
// Rows say which share of the collectives' time backward hides:  1 - waiting / under way,  summed over the buckets
//
//   bucket 0   posted ================================ done          under way: posted to done
//   bucket 1              posted ======================= done        waiting: from wait() to done
//   backward   -----------------------------| wait      wait
#include "benchmarks/peer_gpt.h"
#include "benchmarks/peer_mlp.h"
#include "benchmarks/peer_steps.h"
#include "benchmarks/harness/process_ranks.h"
#include "benchmarks/harness/bench.h"
#include "tessera/comm/detail/records.h"
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
auto wrapped(bool view) {
  return DistributedDataParallel(std::make_shared<Model>(), {.gradient_as_bucket_view = view});
}

struct Case {
  const char* name;
  const char* variant;
  int64_t steps;  // a repetition
  Optimizer optimizer;
  bool view;
  Step (*ours)(const Case& c, int64_t rank);
  Step (*plain)(const Case& c, int64_t rank);
};
Step mlp_ours(const Case& c, int64_t rank) { return mlp_step(wrapped<Mlp>(c.view), c.optimizer, rank); }
Step mlp_plain(const Case& c, int64_t rank) { return mlp_step(std::make_shared<Mlp>(), c.optimizer, rank); }
Step gpt_ours(const Case& c, int64_t rank) { return gpt_step(wrapped<Gpt>(c.view), c.optimizer, rank); }
Step gpt_plain(const Case& c, int64_t rank) { return gpt_step(std::make_shared<Gpt>(), c.optimizer, rank); }

constexpr Case kCases[] = {
    {"mlp", "ddp", 300, Optimizer::Torch, false, mlp_ours, mlp_plain},
    {"gpt", "ddp", 2, Optimizer::Torch, false, gpt_ours, gpt_plain},
    {"mlp", "ddp_view", 300, Optimizer::Torch, true, mlp_ours, mlp_plain},
    {"gpt", "ddp_view", 2, Optimizer::Torch, true, gpt_ours, gpt_plain},
    {"mlp", "ddp_fused", 300, Optimizer::Fused, true, mlp_ours, mlp_plain},
    {"gpt", "ddp_fused", 2, Optimizer::Fused, true, gpt_ours, gpt_plain},
};

// Of the collectives that this thread posts while it is observed.
class Overlap : public comm::Observer {
 public:
  void on_post(const comm::Record& record) override {
    if (record.kind == comm::Kind::Wait) wait_began_ = record.posted;
  }
  void on_done(const comm::Record& record) override {
    under_way_ += record.done - record.posted;
    waiting_ += record.done - wait_began_;
  }
  double hidden() const { return 1 - waiting_ / under_way_; }
  double waiting_ms() const { return waiting_.count() * 1e3; }

 private:
  comm::Record::Time wait_began_{};
  std::chrono::duration<double> waiting_{}, under_way_{};
};

// A bucket that is done early counts as under way until it is waited for, so the share alone flatters: the time that is
// not hidden stands beside it.
std::string overlap_of(const Step& step) {
  constexpr int kSteps = 10;
  Overlap overlap;
  const comm::ObserverScope observed(&overlap);
  for (int i = 0; i < kSteps; i++) step();
  std::ostringstream text;
  text << std::lround(100 * overlap.hidden()) << "% hidden behind backward, " << std::setprecision(3)
       << overlap.waiting_ms() / kSteps << " ms waited for";
  return text.str();
}

void run(int64_t ranks, const EmitRow& emit) {
  run_process_ranks("ddp", ranks, emit, [&](testing::Rank& me, const EmitRow& emit) {
    for (const auto& c : kCases) {
      const auto ours = c.ours(c, me.rank), plain = c.plain(c, me.rank);
      const auto ms = medians_ms(me.group(), c.steps, {ours, plain});
      const auto overlap = overlap_of(ours);
      if (me.rank == 0)
        emit({.name = c10::str(c.name, "/", ranks, "/-/", c.variant),
              .unit = "ms",
              .ours = ms[0],
              .plain = ms[1],
              .note = overlap});
    }
  });
}

}  // namespace
}  // namespace ddp_bench

void register_ddp(BenchRegistry& registry) {
  registry.add({"ddp", "a training step with data parallelism", [](const EmitRow& emit) {
                  ddp_bench::run(2, emit);
                  ddp_bench::run(4, emit);
                }});
}

}  // namespace tessera::bench
