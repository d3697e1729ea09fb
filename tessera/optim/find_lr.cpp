#include "tessera/base/error.h"
#include "tessera/optim/schedulers.h"
#include "tessera/state/load_state_dict.h"
#include "tessera/state/optimizer_state.h"

#include <ATen/core/grad_mode.h>

#include <cmath>

namespace tessera::optim {
namespace {

StateDict copies_of(const StateDict& dict) {
  const at::NoGradGuard no_grad;
  StateDict copies;
  for (const auto& [name, value] : dict) copies.insert(name, value.clone());
  return copies;
}

// Restores module, optimizer and gradients as they were, also after an error in a step.
class SavedTraining {
 public:
  SavedTraining(torch::nn::Module& module, torch::optim::Optimizer& optimizer)
      : module_(module),
        optimizer_(optimizer),
        parameters_(copies_of(state_dict(module))),
        state_(copies_of(optimizer_state_dict(optimizer, module))) {}
  void restore() {
    load_state_dict(module_, parameters_);
    load_optimizer_state_dict(optimizer_, module_, state_);
    optimizer_.zero_grad();
  }

 private:
  torch::nn::Module& module_;
  torch::optim::Optimizer& optimizer_;
  StateDict parameters_, state_;
};

// The learning rate at the steepest descent of the smoothed losses, as central differences over equal factors.
double steepest(const std::vector<double>& lrs, const std::vector<double>& smoothed) {
  double best = smoothed.empty() ? 0 : -1e-9 * std::abs(smoothed[0]), lr = 0;  // a constant loss has rounding errors
  for (size_t i = 1; i + 1 < smoothed.size(); i++)
    if (const double slope = (smoothed[i + 1] - smoothed[i - 1]) / 2; slope < best) {
      best = slope;
      lr = lrs[i];
    }
  return lr;
}

}  // namespace

FindLRResult find_lr(torch::nn::Module& module, torch::optim::Optimizer& optimizer, const std::function<double()>& step,
                     const FindLROptions& options) {
  TESSERA_CHECK(options.min_lr > 0 && options.max_lr > options.min_lr && options.steps >= 3, UsageError,
                "find_lr: min_lr ", options.min_lr, ", max_lr ", options.max_lr, " and ", options.steps,
                " steps were given; min_lr must be greater than 0, max_lr greater than min_lr, and steps at least 3");
  SavedTraining saved(module, optimizer);
  FindLRResult result;
  std::vector<double> smoothed;
  double average = 0, lowest = 0;
  try {
    for (int64_t i = 0; i < options.steps; i++) {
      const double lr = options.min_lr * std::pow(options.max_lr / options.min_lr,
                                                  static_cast<double>(i) / static_cast<double>(options.steps - 1));
      for (auto& group : optimizer.param_groups()) group.options().set_lr(lr);
      const double loss = step();
      average = options.smoothing * average + (1 - options.smoothing) * loss;
      const double now = average / (1 - std::pow(options.smoothing, static_cast<double>(i + 1)));
      if (!std::isfinite(loss)) break;
      result.lrs.push_back(lr);
      result.losses.push_back(loss);
      smoothed.push_back(now);
      if (i == 0 || now < lowest) lowest = now;
      if (i > 0 && now > options.early_stop_threshold * lowest) break;
    }
  } catch (...) {
    saved.restore();
    throw;
  }
  saved.restore();
  result.suggestion = steepest(result.lrs, smoothed);
  return result;
}

}  // namespace tessera::optim
