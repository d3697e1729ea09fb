#pragma once
#include "tessera/optim/adam.h"
#include "tessera/optim/grad_scaler.h"
#include "tessera/train/detail/parallel_model.h"

#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace tessera::train {

struct StepResult {
  // Of this rank, scaled so that the mean over the ranks with different tokens is the global mean. With pipeline
  // stages: 0 on ranks without the last one. With invariant numerics: the global mean.
  at::Tensor loss;
  at::Tensor grad_norm;  // before clipping; the same on every rank
};

// Forward, backward and gradient clipping of a batch, compiled if configured. The optimizer update is separate, so that
// a step can be skipped.
//
// The loss of a rank is (loss ranks / counted targets of the global batch) x (sum over its own targets). Gradients are
// averaged over the loss ranks, so the result is the gradient of the mean over the global batch, also with padding.
class TrainStep {
 public:
  TrainStep(const TrainConfig& config, ParallelModel& model, optim::AdamW& optimizer);
  ~TrainStep();

  StepResult forward_backward(const at::Tensor& input, const at::Tensor& target, int64_t counted);
  // After forward_backward(), call one of these. `bad`: one float on the device of the model; if it is 1, the update
  // changes nothing. With fp16 the gradient scaler decides instead.
  void update(const at::Tensor& bad = {});
  void skip();
  optim::GradScaler& scaler();         // enabled only with fp16
  std::function<void()> on_gradients;  // is called before clipping
  // Why each compilation after the first was necessary; empty if the step is not compiled.
  std::vector<std::string> recompiles() const { return recompiles_ ? recompiles_() : std::vector<std::string>(); }

  struct State;

 private:
  std::shared_ptr<State> state_;
  std::function<at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&)> run_;
  std::function<std::vector<std::string>()> recompiles_;  // null: not compiled
};

std::unique_ptr<optim::AdamW> make_optimizer(const OptimizerOptions& options, const ParallelModel& model);
// The learning rate factor as a function of the number of steps made.
std::function<double(int64_t)> learning_rate_factor(const OptimizerOptions& options, int64_t steps);

}  // namespace tessera::train
