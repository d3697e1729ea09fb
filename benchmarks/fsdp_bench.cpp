// One step of training (forward, backward, optimizer) with parameters cut over the ranks: the seeds' MLP (10 -> 16 ->
// 10, batch 8), one unit, and a small GPT (peer_gpt.h, batch 4 x 128 a rank), a unit for each block and one for the
// rest. Plain is as many independent copies of the model in LibTorch at once as there are ranks, so that both have the
// same cores. The variants fully_shard and fsdp (FullyShardedDataParallel with use_orig_params) have LibTorch's AdamW,
// those with _fused its fused kernel, on both sides.
//
// Rows say how long a step waits for collectives, all of them together.
#include "benchmarks/peer_gpt.h"
#include "benchmarks/peer_mlp.h"
#include "benchmarks/peer_steps.h"
#include "benchmarks/harness/process_ranks.h"
#include "benchmarks/harness/bench.h"
#include "tessera/comm/detail/records.h"
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

// How a module is cut; called for inner ones first.
struct FullyShard {
  static constexpr const char* kName = "fully_shard";
  template <class H>
  static void apply(H& module) {
    fully_shard(module);
  }
};
struct Flat {
  static constexpr const char* kName = "fsdp";
  template <class H>
  static void apply(H& module) {
    FullyShardedDataParallel(module, {.use_orig_params = true});  // the hooks that it has put there stay
  }
};

template <class Cut>
Step mlp_ours(Optimizer optimizer, int64_t rank) {
  models::MLP model(models::mlp_module());
  Cut::apply(model);
  return mlp_step(model, optimizer, rank);
}
template <class Cut>
Step gpt_ours(Optimizer optimizer, int64_t rank) {
  Gpt model;
  for (auto& block : model->blocks) Cut::apply(block);
  Cut::apply(model);
  return gpt_step(model, optimizer, rank);
}
Step mlp_plain(Optimizer optimizer, int64_t rank) {
  return mlp_step(std::make_shared<PeerMlp>(), optimizer, rank);
}
Step gpt_plain(Optimizer optimizer, int64_t rank) { return gpt_step(std::make_shared<PlainGpt>(), optimizer, rank); }

struct Case {
  const char* name;
  const char* variant;
  int64_t steps;  // a repetition
  Optimizer optimizer;
  Step (*ours)(Optimizer optimizer, int64_t rank);
  Step (*plain)(Optimizer optimizer, int64_t rank);
};
constexpr Case kCases[] = {
    {"mlp", "fully_shard", 300, Optimizer::Torch, mlp_ours<FullyShard>, mlp_plain},
    {"gpt", "fully_shard", 2, Optimizer::Torch, gpt_ours<FullyShard>, gpt_plain},
    {"mlp", "fsdp", 300, Optimizer::Torch, mlp_ours<Flat>, mlp_plain},
    {"gpt", "fsdp", 2, Optimizer::Torch, gpt_ours<Flat>, gpt_plain},
    {"mlp", "fully_shard_fused", 300, Optimizer::Fused, mlp_ours<FullyShard>, mlp_plain},
    {"gpt", "fully_shard_fused", 2, Optimizer::Fused, gpt_ours<FullyShard>, gpt_plain},
};

class Waiting : public comm::Observer {
 public:
  void on_post(const comm::Record& record) override {
    if (record.kind == comm::Kind::Wait) began_ = record.posted;
  }
  void on_done(const comm::Record& record) override { total_ += record.done - began_; }
  double ms() const { return total_.count() * 1e3; }

 private:
  comm::Record::Time began_{};
  std::chrono::duration<double> total_{};
};

std::string waited(const Step& step) {
  constexpr int kSteps = 10;
  Waiting waiting;
  const comm::ObserverScope observed(&waiting);
  for (int i = 0; i < kSteps; i++) step();
  std::ostringstream text;
  text << std::setprecision(3) << waiting.ms() / kSteps << " ms in collectives";
  return text.str();
}

void run(int64_t ranks, const EmitRow& emit) {
  run_process_ranks("fsdp", ranks, emit, [&](testing::Rank& me, const EmitRow& emit) {
    for (const auto& c : kCases) {
      const auto ours = c.ours(c.optimizer, me.rank), plain = c.plain(c.optimizer, me.rank);
      const auto ms = medians_ms(me.group(), c.steps, {ours, plain});
      const auto note = waited(ours);
      if (me.rank == 0)
        emit({.name = c10::str(c.name, "/", ranks, "/-/", c.variant),
              .unit = "ms",
              .ours = ms[0],
              .plain = ms[1],
              .note = note});
    }
  });
}

}  // namespace
}  // namespace fsdp_bench

void register_fsdp(BenchRegistry& registry) {
  registry.add({"fsdp", "a training step with parameters cut over the ranks", [](const EmitRow& emit) {
                  fsdp_bench::run(2, emit);
                  fsdp_bench::run(4, emit);
                }});
}

}  // namespace tessera::bench
