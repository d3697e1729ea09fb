#pragma once
#include "tessera/optim/detail/learning_rate.h"
#include "tessera/optim/optimizer.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_foreach_sub.h>
#include <ATen/ops/ones.h>

#include <optional>

namespace tessera::optim::detail {

// Adds 1 to the step of each parameter, as a tensor: with a number, _foreach_add_ would create a tensor for each step.
inline void increment_steps(const Tensors& steps) { at::_foreach_add_(steps, at::ones({}, steps[0].options())); }

// Runs one of LibTorch's fused kernels: call(lr, scale, found_inf), with lr as a number or as a tensor. `steps` counts
// the updates of each parameter; a skipped update does not count. Empty: the optimizer has no steps.
template <class Call>
void run_fused(const LearningRate& lr, const Tensors& steps, const Optimizer::Scaling* scaling, const Call& call) {
  const at::AutoDispatchBelowADInplaceOrView below;  // these kernels do not bump versions; run_updates does
  std::optional<at::Tensor> scale, found_inf;
  if (scaling) found_inf = scaling->found_inf;
  if (scaling && scaling->scale.defined()) scale = scaling->scale;
  if (!steps.empty()) increment_steps(steps);
  if (lr.is_tensor())
    call(lr.tensor(), scale, found_inf);
  else
    call(lr.number(), scale, found_inf);
  if (scaling && !steps.empty())  // undo the increment if the kernel skipped the update
    at::_foreach_sub_(steps, Tensors(steps.size(), scaling->found_inf.view(c10::IntArrayRef())));
}

}  // namespace tessera::optim::detail
