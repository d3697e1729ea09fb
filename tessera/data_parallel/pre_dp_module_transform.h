#pragma once
#include "tessera/placement/detail/tensor_spec.h"

#include <torch/nn/module.h>

#include <string>
#include <vector>

namespace tessera {

// A parameter that is a DTensor.
struct DistributedParameter {
  std::string name;  // its path in the module
  SpecRef spec;      // its mesh and placements
};

// For PyTorch users: PyTorch requires this call before DistributedDataParallel of a module with DTensor parameters, and
// replaces them by their local tensors. Tessera does not: DDP reduces the local tensors. This function returns the
// DTensor parameters. Throws UsageError if one is on a mesh that this rank is not part of.
std::vector<DistributedParameter> pre_dp_module_transform(const torch::nn::Module& module);

}  // namespace tessera
