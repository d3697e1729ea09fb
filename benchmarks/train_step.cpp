#include "benchmarks/train_step.h"

#include "benchmarks/harness/bench_timer.h"
#include "tessera/dtensor/dtensor.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <torch/optim/adamw.h>

#include <algorithm>
#include <memory>

namespace tessera::bench {
namespace {

class FusedAdamW {
 public:
  explicit FusedAdamW(const std::vector<at::Tensor>& parameters) {
    at::NoGradGuard no_grad;
    for (const auto& p : parameters) {
      auto& list = lists_[is_dtensor(p)];
      list.parameters.push_back(p);
      list.exp_avg.push_back(at::zeros_like(p)), list.exp_avg_sq.push_back(at::zeros_like(p));
      list.steps.push_back(at::zeros({}));
    }
  }
  void zero_grad() {
    for (auto& list : lists_)
      for (auto& p : list.parameters) p.mutable_grad().reset();
  }
  void step() {
    at::NoGradGuard no_grad;
    for (auto& list : lists_) {
      if (list.parameters.empty()) continue;
      std::vector<at::Tensor> gradients;
      for (const auto& p : list.parameters) gradients.push_back(p.grad());
      at::_foreach_add_(list.steps, 1);
      at::_fused_adamw_(list.parameters, gradients, list.exp_avg, list.exp_avg_sq, {}, list.steps, 1e-3, 0.9, 0.999,
                        0.01, 1e-8, /*amsgrad=*/false, /*maximize=*/false);
    }
  }

 private:
  struct List {
    std::vector<at::Tensor> parameters, exp_avg, exp_avg_sq, steps;
  };
  List lists_[2];  // plain tensors, DTensors
};

template <class Adam>
Step with_adam(std::shared_ptr<Adam> adam, std::function<at::Tensor()> loss) {
  return [adam, loss = std::move(loss)] {
    adam->zero_grad();
    loss().backward();
    adam->step();
  };
}

}  // namespace

Step train_step(Optimizer optimizer, const std::vector<at::Tensor>& parameters, std::function<at::Tensor()> loss) {
  if (optimizer == Optimizer::Fused) return with_adam(std::make_shared<FusedAdamW>(parameters), std::move(loss));
  const torch::optim::AdamWOptions options(1e-3);
  return with_adam(std::make_shared<torch::optim::AdamW>(parameters, options), std::move(loss));
}

at::Generator generator(uint64_t seed) { return at::make_generator<at::CPUGeneratorImpl>(seed); }

std::vector<double> medians_ms(const comm::Group& group, int64_t steps, const std::vector<Step>& functions) {
  constexpr int kRepetitions = 9;
  std::vector<std::vector<double>> samples(functions.size());
  for (int repetition = -1; repetition < kRepetitions; repetition++)  // the first one is warm-up
    for (size_t i = 0; i < functions.size(); i++) {
      group->barrier().wait();
      const double start = now_us(TimerClock::Wall);
      for (int64_t step = 0; step < steps; step++) functions[i]();
      group->barrier().wait();
      if (repetition >= 0) samples[i].push_back((now_us(TimerClock::Wall) - start) * 1e-3 / static_cast<double>(steps));
    }
  std::vector<double> medians;
  for (auto& each : samples) {
    std::sort(each.begin(), each.end());
    medians.push_back(each[each.size() / 2]);
  }
  return medians;
}

void emit_step_row(testing::Rank& me, const StepCase& step_case, const Step& ours, const Step& plain,
                   const EmitRow& emit, const std::function<std::string(const Step&)>& note) {
  const auto ms = medians_ms(me.group(), step_case.steps, {ours, plain});
  const auto text = note ? note(ours) : "";
  if (me.rank != 0) return;
  emit({.name = c10::str(step_case.model, "/", me.size(), "/-/", step_case.variant),
        .unit = "ms",
        .ours = ms[0],
        .plain = ms[1],
        .note = text});
}

}  // namespace tessera::bench
