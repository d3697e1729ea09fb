#pragma once
#include "tessera/optim/optimizer.h"

#include <vector>

namespace tessera::optim {

// Options of GradScaler, with the names and defaults of torch.amp.GradScaler.
struct GradScalerOptions {
  double init_scale = 65536;       // the first scale
  double growth_factor = 2;        // the scale grows by this factor
  double backoff_factor = 0.5;     // the scale shrinks by this factor after a step with inf or NaN gradients
  int64_t growth_interval = 2000;  // steps without inf or NaN before the scale grows
  bool enabled = true;             // false: all methods pass through
};

// Gradient scaling for fp16 training (torch.amp.GradScaler). The loss is multiplied by a scale, so that small fp16
// gradients do not underflow; the gradients are divided by it before the step. A step with inf or NaN gradients is
// skipped and the scale shrinks; after growth_interval good steps it grows. All ranks of the gradients' meshes skip
// together: one all-reduce per mesh. (A plain gradient is taken to be equal on all ranks, as data parallelism leaves
// it.)
//
//   scaler.scale(loss).backward();
//   scaler.unscale_(opt);  clip_grad_norm_(...);      // only if something reads the gradients before the step
//   scaler.step(opt);
//   scaler.update();
//
// Takes optimizers of tessera::optim and torch::optim.
// No value is copied to the host, so the step can be compiled: fused kernels skip a step on the device. (On the CPU,
// groups that are not fused are updated by fused kernels too. On other devices they need to know on the host whether to
// step. So do optimizers of torch::optim, on every device.)
class GradScaler {
 public:
  // Throws UsageError for options out of range.
  explicit GradScaler(GradScalerOptions options = {});

  // Returns loss * scale.
  at::Tensor scale(const at::Tensor& loss);
  // Divides the gradients by the scale, in place. Throws UsageError if they are already unscaled since the last update,
  // and for fp16 gradients: fp16 parameters do not need a scaler.
  void unscale_(torch::optim::Optimizer& optimizer);
  // Unscales if needed, then steps unless a gradient is inf or NaN.
  void step(torch::optim::Optimizer& optimizer);
  // Adjusts the scale. Call it once, after the step of all optimizers.
  void update();

  // Whether scaling is on.
  bool enabled() const { return options_.enabled; }
  // The scale as a number. Copies it to the host.
  double get_scale() const;
  // The scale as a tensor float[1], without a copy to the host.
  const at::Tensor& scale_tensor() const { return scale_; }
  // Whether a gradient was inf or NaN since the last update: float[1], 1 or 0.
  at::Tensor found_inf(const torch::optim::Optimizer& optimizer) const;
  // scale and growth_tracker.
  StateDict state_dict() const;
  // Restores what state_dict returned.
  void load_state_dict(const StateDict& dict);

 private:
  struct OptimizerState {
    const torch::optim::Optimizer* optimizer;
    at::Tensor found_inf;
    bool unscaled = false, stepped = false;
  };
  OptimizerState& state_of(const torch::optim::Optimizer& optimizer);
  void check_gradients(torch::optim::Optimizer& optimizer, OptimizerState& state, bool unscale);
  void move_to(at::Device device);

  GradScalerOptions options_;
  at::Tensor scale_, growth_tracker_;                 // float[1], int[1]
  std::vector<OptimizerState> per_optimizer_states_;  // since the last update
};

}  // namespace tessera::optim
