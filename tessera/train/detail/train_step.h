#pragma once
#include "tessera/optim/adam.h"
#include "tessera/optim/grad_scaler.h"
#include "tessera/train/detail/model_layout.h"

#include <functional>
#include <memory>

namespace tessera::train {

struct StepResult {
  at::Tensor loss;       // this rank's part of the sum that is the mean over all targets, times the data ranks
  at::Tensor grad_norm;  // before clipping; the same on every rank
};

// Forward and backward of a batch, compiled if asked, then clipping; and the update, which may be left out.
//
// Each rank's loss is (data ranks / counted targets of all) x (sum over its own), so the mean that data parallelism
// takes of gradients is the gradient of the mean over the global batch, padding or not.
class Step {
 public:
  Step(const TrainConfig& config, Layout& layout, optim::AdamW& optimizer);
  ~Step();

  StepResult forward_backward(const at::Tensor& input, const at::Tensor& target, int64_t counted);
  void update();  // or
  void skip();
  optim::GradScaler& scaler();  // not enabled but for fp16

  struct Parts;  // what a step works on

 private:
  std::shared_ptr<Parts> parts_;
  std::function<at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&)> run_;
};

std::unique_ptr<optim::AdamW> make_optimizer(const OptimizerOptions& options, const torch::nn::Module& module);
// The factor of the learning rate by the number of steps made.
std::function<double(int64_t)> learning_rate_factor(const OptimizerOptions& options, int64_t steps);

}  // namespace tessera::train
