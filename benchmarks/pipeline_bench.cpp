// Pipeline schedules on 4 processes.
//
// sleep: every stage sleeps 20 ms in forward, 20 ms for the gradient of its input and 20 ms for that of its weights.
//        32 microbatches. `ours` is the time of a step in milliseconds. `plain` is the formula of GPipe and 1F1B,
//        (m + p - 1) x 60 ms, the time without a bubble of ZBVZeroBubble, m x 120 ms, and the simulated time of the
//        others.
// mlp:   stages of two Linear layers, 16 microbatches, as in the peer. `ours` is the time per microbatch in
//        microseconds. `plain` is that of the forwards and backwards alone, without a schedule and messages, at the
//        same time on all ranks. The difference is the overhead.
#include "benchmarks/harness/bench.h"
#include "benchmarks/harness/process_ranks.h"
#include "tessera/pipelining/detail/lowering.h"
#include "tessera/pipelining/detail/schedules.h"
#include "tessera/pipelining/detail/simulate.h"
#include "tessera/pipelining/schedule.h"

#include <ATen/ops/gelu.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <sys/prctl.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <chrono>
#include <thread>

namespace tessera::bench {
namespace pipeline_bench {
namespace {

using pipelining::PipelineShape;
using pipelining::PipelineStage;
using Clock = std::chrono::steady_clock;
constexpr std::chrono::milliseconds kSleep{20};

// y = x, which takes kSleep in forward and for the gradient of the input.
struct SleepingIdentity : torch::autograd::Function<SleepingIdentity> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) {
    std::this_thread::sleep_for(kSleep);
    return x.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 const torch::autograd::variable_list& gradients) {
    std::this_thread::sleep_for(kSleep);
    return {gradients[0]};
  }
};
// w, whose gradient takes kSleep.
struct SleepingWeight : torch::autograd::Function<SleepingWeight> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& w) { return w.clone(); }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 const torch::autograd::variable_list& gradients) {
    std::this_thread::sleep_for(kSleep);
    return {gradients[0]};
  }
};

PipelineStage sleeping_stage(int64_t index, int64_t stages) {
  at::Tensor w = at::ones({4}).requires_grad_();
  return {
      [w](const at::Tensor& x) { return SleepingIdentity::apply(x) + SleepingWeight::apply(w); }, {w}, index, stages};
}

constexpr int64_t kWidth = 128, kRows = 16, kLayers = 2;
PipelineStage mlp_stage(int64_t index, int64_t stages) {
  std::vector<at::Tensor> weights;
  for (int64_t i = 0; i < kLayers; ++i) weights.push_back((at::randn({kWidth, kWidth}) / 11).requires_grad_());
  return {[weights](const at::Tensor& x) {
            at::Tensor y = x;
            for (const at::Tensor& w : weights) y = at::gelu(at::mm(y, w));
            return y;
          },
          weights, index, stages};
}

double median(std::vector<double> values) {
  std::ranges::sort(values);
  return values[values.size() / 2];
}

double seconds_of(testing::Rank& me, const std::function<void()>& run) {
  me.group()->barrier().wait();
  const auto begin = Clock::now();
  run();
  me.group()->barrier().wait();
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

double simulated(const std::string& schedule, const PipelineShape& shape) {
  const auto ranks = pipelining::stage_ranks(schedule, shape);
  const auto table =
      pipelining::lower_schedule(pipelining::compute_schedule(schedule, shape), ranks, shape.microbatches);
  const double sleep = std::chrono::duration<double>(kSleep).count();
  std::vector<pipelining::StageCost> costs(shape.stages(), {sleep, sleep, sleep, 0, 1});
  return pipelining::simulate(table, costs).seconds;
}

// Without communication and overhead, in seconds.
double expected(const std::string& schedule, const PipelineShape& shape) {
  const double each = 3 * std::chrono::duration<double>(kSleep).count(), m = static_cast<double>(shape.microbatches);
  if (schedule == "GPipe" || schedule == "1F1B") return (m + static_cast<double>(shape.ranks) - 1) * each;
  if (schedule == "ZBVZeroBubble") return m * static_cast<double>(shape.stages_per_rank) * each;
  return simulated(schedule, shape);
}

at::Tensor mean_square(const at::Tensor& y, const at::Tensor& target) { return (y - target).square().mean(); }

struct PipelineCase {
  const char* schedule;
  int64_t stages_per_rank;
};
constexpr PipelineCase kCases[] = {{"GPipe", 1},           {"1F1B", 1},
                                   {"Interleaved1F1B", 2}, {"InterleavedZeroBubble", 2},
                                   {"ZBVZeroBubble", 2},   {"DualPipeV", 2}};

void run(int64_t ranks, int64_t sleeping_microbatches, int64_t microbatches, const EmitRow& emit) {
  run_process_ranks("pipeline", ranks, emit, [&](testing::Rank& me, const EmitRow& emit) {
    prctl(PR_SET_TIMERSLACK, 1);  // a sleep ends on time
    for (const PipelineCase& each : kCases) {
      const PipelineShape shape{ranks, each.stages_per_rank, sleeping_microbatches};
      const auto owner = pipelining::stage_ranks(each.schedule, shape);
      const auto schedule_of = [&](PipelineStage (*make)(int64_t, int64_t), int64_t microbatches) {
        std::vector<PipelineStage> stages;
        for (int64_t i = 0; i < shape.stages(); ++i)
          if (owner[i] == me.rank) stages.push_back(make(i, shape.stages()));
        return pipelining::PipelineSchedule(each.schedule, stages, microbatches, mean_square, me.group());
      };
      auto sleeping = schedule_of(sleeping_stage, sleeping_microbatches);
      // The input requires a gradient, so that all stages take as long.
      const at::Tensor row = at::randn({sleeping_microbatches, 4}).requires_grad_();
      std::vector<double> slept;
      for (int i = 0; i < 3; ++i) slept.push_back(seconds_of(me, [&] { sleeping.step(row, row.detach()); }));
      const auto suffix = [&](int64_t microbatches) {
        return c10::str('/', ranks, '/', microbatches, '/', each.schedule);
      };
      const double planned = expected(each.schedule, shape);
      emit({.name = "sleep" + suffix(sleeping_microbatches),
            .unit = "ms",
            .ours = median(slept) * 1e3,
            .plain = planned * 1e3,
            .note = c10::str("ratio ", median(slept) / planned, "; simulated ",
                             static_cast<int64_t>(simulated(each.schedule, shape) * 1e3 + 0.5))});

      auto mlp = schedule_of(mlp_stage, microbatches);
      const at::Tensor x = at::randn({microbatches * kRows, kWidth});
      const at::Tensor gradient = at::ones({kRows, kWidth});
      const auto alone = [&] {
        for (const at::Tensor& part : x.chunk(microbatches))
          for (const PipelineStage& stage : mlp.stages()) {
            at::Tensor input = part.detach().requires_grad_();
            stage.forward(input).backward(gradient);
          }
      };
      std::vector<double> scheduled, plain;
      for (int i = 0; i < 31; ++i) {
        scheduled.push_back(seconds_of(me, [&] { mlp.step(x, x); }));
        plain.push_back(seconds_of(me, alone));
      }
      const double per_microbatch = 1e6 / static_cast<double>(microbatches);
      const double overhead = (median(scheduled) - median(plain)) * per_microbatch;
      emit({.name = "mlp" + suffix(microbatches),
            .unit = "us",
            .ours = median(scheduled) * per_microbatch,
            .plain = median(plain) * per_microbatch,
            .note = c10::str("overhead ", static_cast<int64_t>(overhead), " us per microbatch")});
    }
  });
}

}  // namespace
}  // namespace pipeline_bench

void register_pipeline(BenchRegistry& registry) {
  registry.add({"pipeline", "pipeline schedules, measured and simulated",
                [](const EmitRow& emit) { pipeline_bench::run(4, 32, 16, emit); }});
}

}  // namespace tessera::bench
