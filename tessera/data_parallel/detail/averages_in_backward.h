#pragma once
#include <torch/nn/module.h>

namespace tessera::data_parallel {

// Whether the module averages its gradients in each backward pass: a DistributedDataParallel, or a module that was
// given to replicate().
bool averages_in_backward(const torch::nn::Module& module);

}  // namespace tessera::data_parallel
