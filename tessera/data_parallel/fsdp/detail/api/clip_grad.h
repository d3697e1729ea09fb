#pragma once
#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

namespace tessera::data_parallel::fsdp {

// Scales all gradients of a module in place, sharded or not, so that their norm over all ranks is at most max_norm.
// Returns the norm before scaling. norm_type: above 0, or infinity. All ranks call it.
// The gradient of a parameter that is in no group (an ignored one) is the same on all ranks and counts once.
at::Tensor clip_grad_norm_(const torch::nn::Module& module, double max_norm, double norm_type);

}  // namespace tessera::data_parallel::fsdp
