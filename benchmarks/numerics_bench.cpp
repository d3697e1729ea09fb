// Time of a train step (forward, backward, AdamW) under Numerics::Invariant, beside the default step with the same
// parallelism: a small GPT (peer_gpt.h) on a global batch of 24 x 128 tokens, one thread per rank. The default step
// computes the rows of a rank at once and has fused AdamW. The invariant step has 24 virtual shards.
//
// ours: invariant. plain: default. The bar is a ratio of 1.25. Rows with _compiled: both steps are compiled, the
// default one with Numerics::Fast, as compile() does; the bar is 1.15.
#include "benchmarks/harness/bench.h"
#include "benchmarks/harness/process_ranks.h"
#include "benchmarks/peer_gpt.h"
#include "benchmarks/train_step.h"
#include "tessera/compile/api/compile.h"
#include "tessera/data_parallel/fsdp/fully_shard.h"
#include "tessera/data_parallel/replicate.h"
#include "tessera/data_parallel/virtual_shards.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/numerics/numerics.h"
#include "tessera/optim/adam.h"
#include "tessera/tensor_parallel/loss_parallel.h"
#include "tessera/tensor_parallel/parallelize_module.h"

#include <ATen/core/Reduction.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/randint.h>

#include <memory>
#include <utility>

namespace tessera::bench {
namespace numerics_bench {
namespace {

using Gpt = Holder<PeerGpt<TesseraLayers>>;
constexpr int64_t kRows = VirtualShards::kCount, kTokens = 128;

enum class Parallel { None, DDP, FSDP, TP };
struct NumericsCase {
  const char* name;
  Parallel parallel;
};
constexpr NumericsCase kCases[] = {{"ddp", Parallel::DDP}, {"fsdp", Parallel::FSDP}, {"tp", Parallel::TP}};

Gpt make_model(Parallel parallel, const DeviceMesh& mesh) {
  Gpt model;
  if (parallel == Parallel::DDP) {
    ReplicateOptions options;
    options.device_mesh = mesh;
    options.gradient_as_bucket_view = true;
    replicate(model, options);
  }
  if (parallel == Parallel::FSDP) {
    for (auto& block : model->blocks) fully_shard(block, {.mesh = mesh});
    fully_shard(model, {.mesh = mesh});
  }
  if (parallel == Parallel::TP) parallelize_module(model, mesh, peer_gpt_plan());
  return model;
}

at::Tensor loss_of(Gpt& model, const at::Tensor& in, const at::Tensor& target) {
  const LossParallel scope;  // no effect without TP
  const at::Tensor loss = at::cross_entropy_loss(model(in).flatten(0, 1), target.flatten(), {}, at::Reduction::Sum) /
                          double(kRows * kTokens);
  return is_dtensor(loss) ? DTensor(loss).full_tensor() : loss;
}

// The step, compiled if asked for. The first call of a compiled invariant step is eager: it compares bits.
template <class F>
Step bound(F step, Gpt model, std::shared_ptr<optim::AdamW> optimizer, bool invariant, bool compiles) {
  const auto numerics = invariant ? Numerics::Invariant : Numerics::Fast;
  if (!compiles)
    return [=]() mutable {
      const NumericsScope scope(numerics);
      step(model, *optimizer);
    };
  auto compiled = compile(step, {.captures = Captures::None, .numerics = numerics});
  return [=, is_first = true]() mutable {
    const NumericsScope scope(numerics);
    if (std::exchange(is_first, false) && invariant)
      step(model, *optimizer);
    else
      compiled(model, *optimizer);
  };
}

Step step_of(Parallel parallel, const DeviceMesh& mesh, bool invariant, bool compiles) {
  auto model = make_model(parallel, mesh);
  const auto text = at::randint(256, {kRows, kTokens + 1}, generator(1), at::kLong);
  const bool shares_rows = parallel == Parallel::DDP || parallel == Parallel::FSDP;
  const int64_t rows = shares_rows ? kRows / mesh.size() : kRows;
  const auto mine = text.narrow(0, shares_rows ? rows * mesh.get_local_rank() : 0, rows);
  const auto in = mine.narrow(1, 0, kTokens).contiguous(), target = mine.narrow(1, 1, kTokens).contiguous();
  auto optimizer = std::make_shared<optim::AdamW>(model->parameters(), optim::AdamWOptions{.lr = 1e-3, .fused = true});
  if (!invariant)
    return bound(
        [=](Gpt& model, optim::AdamW& optimizer) {
          optimizer.zero_grad();
          loss_of(model, in, target).backward();
          optimizer.step();
        },
        model, optimizer, invariant, compiles);
  if (parallel == Parallel::DDP) replicated(model).set_requires_gradient_sync(false);
  auto shards = std::make_shared<VirtualShards>(*model, shares_rows ? mesh : DeviceMesh(), kRows, VirtualShards::kAll);
  return bound(
      [=](Gpt& model, optim::AdamW& optimizer) {
        optimizer.zero_grad();
        for (int64_t i = 0, passes = shards->local_count(); i < passes; i++) {
          loss_of(model, shards->rows(in, i), shards->rows(target, i)).backward();
          shards->add_gradients();
        }
        shards->reduce_gradients();
        optimizer.step();
      },
      model, optimizer, invariant, compiles);
}

void emit_case(testing::Rank& me, const std::string& name, Parallel parallel, const EmitRow& emit) {
  const auto mesh = me.mesh({me.size()}, {"x"});
  for (const bool compiles : {false, true}) {
    const auto ms =
        medians_ms(me.group(), 1, {step_of(parallel, mesh, true, compiles), step_of(parallel, mesh, false, compiles)});
    if (me.rank != 0) continue;
    emit({.name = c10::str("gpt/", me.size(), "/-/", name, compiles ? "_compiled" : ""),
          .unit = "ms",
          .ours = ms[0],
          .plain = ms[1]});
  }
}

}  // namespace
}  // namespace numerics_bench

void register_numerics(BenchRegistry& registry) {
  registry.add({"numerics", "train step under Numerics::Invariant beside the default", [](const EmitRow& emit) {
                  using namespace numerics_bench;
                  run_process_ranks("numerics", 1, emit, [](testing::Rank& me, const EmitRow& emit) {
                    emit_case(me, "one", Parallel::None, emit);
                  });
                  run_process_ranks("numerics", 2, emit, [](testing::Rank& me, const EmitRow& emit) {
                    for (const auto& c : kCases) emit_case(me, c.name, c.parallel, emit);
                  });
                }});
}

}  // namespace tessera::bench
