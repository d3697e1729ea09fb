#pragma once
#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

namespace tessera::data_parallel::fsdp {

// FullyShardedDataParallel::clip_grad_norm_, for all gradients in a module, sharded or not. Those of parameters that no
// unit has (ignored ones) are this rank's own, and count as everybody's.
at::Tensor clip_grad_norm_(const torch::nn::Module& module, double max_norm, double norm_type);

}  // namespace tessera::data_parallel::fsdp
