// Time of an optimizer step on 1,000 small DTensor parameters, sharded on dim 0 over one and over two ranks, with
// gradients of the same placement. Shows the overhead of DTensor: 32 x 32, and 4 x 4, where overhead dominates. Plain
// is the same step on plain tensors with the local sizes. In the variant fused_kernel, plain calls LibTorch's two
// kernels without an optimizer. The step does not communicate, so the thread CPU time counts: the best of many
// alternating pairs, because a busy machine only adds time.
#include "benchmarks/harness/bench.h"
#include "benchmarks/harness/bench_timer.h"
#include "tessera/base/error.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/optim/adam.h"
#include "tessera/optim/sgd.h"
#include "tessera/testing/ranks.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <functional>
#include <memory>
#include <vector>

namespace tessera::bench {
namespace optim_bench {
namespace {

constexpr int64_t kParameters = 1000;

using Tensors = std::vector<at::Tensor>;
using Step = std::function<void()>;

at::Tensor values(int64_t side, double scale) {
  return at::arange(side * side, at::kFloat).mul_(scale).sin_().view({side, side});
}

// Square parameters with gradients: DTensors, or plain tensors with the values of their local shards.
Tensors parameters(const DeviceMesh& mesh, int64_t side, bool plain) {
  Tensors all;
  for (int64_t i = 0; i < kParameters; i++) {
    const auto make = [&](const at::Tensor& t) {
      const DTensor sharded = distribute_tensor(t, mesh, {Shard(0)}, {.src_data_rank = {}});
      return plain ? sharded.to_local().clone() : at::Tensor(sharded).detach();
    };
    all.push_back(make(values(side, 0.1)).requires_grad_());
    all.back().mutable_grad() = make(values(side, 0.3));
  }
  return all;
}

// LibTorch's fused AdamW is two kernels. Includes reading the gradients, as every optimizer does.
struct FusedKernels {
  Tensors parameters, exp_avg = {}, exp_avg_sq = {}, steps = {};

  explicit FusedKernels(Tensors params) : parameters(std::move(params)) {
    for (const auto& p : parameters) {
      exp_avg.push_back(at::zeros_like(p)), exp_avg_sq.push_back(at::zeros_like(p));
      steps.push_back(at::zeros({}));
    }
  }
  void step() {
    const at::NoGradGuard no_grad;
    Tensors gradients;
    gradients.reserve(parameters.size());
    for (const auto& p : parameters) gradients.push_back(p.grad());
    at::_foreach_add_(steps, at::ones({}));
    at::_fused_adamw_(parameters, gradients, exp_avg, exp_avg_sq, {}, steps, 1e-3, 0.9, 0.999, 0.01, 1e-8,
                      /*amsgrad=*/false, /*maximize=*/false);
  }
};

template <class Optimizer>
Step step_of(std::shared_ptr<Optimizer> optimizer) {
  return [optimizer] { optimizer->step(); };
}
Step adamw_fused(Tensors p) { return step_of(std::make_shared<optim::AdamW>(p, optim::AdamWOptions{.fused = true})); }
Step adam_foreach(Tensors p) { return step_of(std::make_shared<optim::Adam>(p)); }
Step sgd_foreach(Tensors p) { return step_of(std::make_shared<optim::SGD>(p, optim::SGDOptions{.momentum = 0.9})); }
Step fused_kernels(Tensors p) { return step_of(std::make_shared<FusedKernels>(std::move(p))); }

constexpr struct {
  const char* name;
  int64_t side;
  const char* variant;
  Step (*ours)(Tensors);
  Step (*plain)(Tensors);
} kCases[] = {
    {"adamw", 32, "fused", adamw_fused, adamw_fused},    {"adamw", 32, "fused_kernel", adamw_fused, fused_kernels},
    {"adam", 32, "foreach", adam_foreach, adam_foreach}, {"sgd", 32, "foreach", sgd_foreach, sgd_foreach},
    {"adamw", 4, "fused", adamw_fused, adamw_fused},     {"adamw", 4, "fused_kernel", adamw_fused, fused_kernels},
    {"adam", 4, "foreach", adam_foreach, adam_foreach},  {"sgd", 4, "foreach", sgd_foreach, sgd_foreach},
};

void run(int64_t ranks, const EmitRow& emit) {
  testing::run_ranks(ranks, [&](testing::Rank& me) {
    const auto mesh = me.mesh({ranks}, {"dp"});
    for (const auto& c : kCases) {
      const auto ours = parameters(mesh, c.side, false), plain = parameters(mesh, c.side, true);
      const auto step_ours = c.ours(ours), step_plain = c.plain(plain);
      step_ours(), step_plain();
      TESSERA_CHECK(at::allclose(DTensor(ours[0]).to_local(), plain[0], 1e-5, 1e-6), InternalError, c.name, " ",
                    c.variant, ": a step on DTensors gives other values than on plain tensors");
      const TimerOptions options{.clock = TimerClock::ThreadCpu, .repetitions = 101, .iterations = 2};
      const auto [a, b] = time_alternating(options, step_ours, step_plain);
      if (me.rank == 0)
        emit({.name = c10::str(c.name, "/", ranks, "/", kParameters, "x", c.side, "x", c.side, "/", c.variant),
              .unit = "us",
              .ours = a.best_us,
              .plain = b.best_us,
              .note = c10::str("ratio to plain: ", a.best_us / b.best_us)});
    }
  });
}

}  // namespace
}  // namespace optim_bench

void register_optim(BenchRegistry& registry) {
  registry.add({"optim", "optimizer step on 1,000 small DTensor parameters", [](const EmitRow& emit) {
                  optim_bench::run(1, emit);
                  optim_bench::run(2, emit);
                }});
}

}  // namespace tessera::bench
