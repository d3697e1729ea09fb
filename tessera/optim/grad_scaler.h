#pragma once
#include "tessera/optim/optimizer.h"

#include <vector>

namespace tessera::optim {

struct GradScalerOptions {
  double init_scale = 65536;
  double growth_factor = 2;
  double backoff_factor = 0.5;
  int64_t growth_interval = 2000;
  bool enabled = true;
};

// Keeps small fp16 gradients from vanishing: the loss is multiplied by a scale, the gradients are divided by it again.
// A step in which a gradient is not finite is not made, and the scale shrinks; after growth_interval good ones it
// grows. All ranks of the meshes on which gradients lie agree on it, so no rank steps alone: one all-reduce for each
// mesh (a plain gradient is taken to be the same everywhere, as data parallelism leaves it).
//
//   scaler.scale(loss).backward();
//   scaler.unscale_(opt);  clip_grad_norm_(...);      // only where someone looks at the gradients before the step
//   scaler.step(opt);
//   scaler.update();
//
// Nothing is read on the host, so the step can be compiled: fused kernels leave out a step by themselves. (A group that
// is not fused is updated by them, too, on the CPU; elsewhere it must be known on the host whether to step.)
class GradScaler {
 public:
  explicit GradScaler(GradScalerOptions options = {});

  at::Tensor scale(const at::Tensor& loss);
  // Divides the gradients, in place. UsageError if it was done since the last update, or for fp16 gradients: parameters
  // in fp16 have no use for a scaler.
  void unscale_(Optimizer& optimizer);
  void step(Optimizer& optimizer);
  void update();

  bool enabled() const { return options_.enabled; }
  double get_scale() const;                                  // reads it on the host
  const at::Tensor& scale_tensor() const { return scale_; }  // float[1]
  at::Tensor found_inf(const Optimizer& optimizer) const;    // since the last update: float[1], 1 or 0
  StateDict state_dict() const;                              // scale and growth_tracker
  void load_state_dict(const StateDict& dict);

 private:
  struct Seen {
    const Optimizer* optimizer;
    at::Tensor found_inf;
    bool unscaled = false, stepped = false;
  };
  Seen& seen(const Optimizer& optimizer);
  void look(Optimizer& optimizer, Seen& seen, bool unscale);
  void move_to(at::Device device);

  GradScalerOptions options_;
  at::Tensor scale_, growth_tracker_;  // float[1], int[1]
  std::vector<Seen> seen_;             // since the last update
};

}  // namespace tessera::optim
