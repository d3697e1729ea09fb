#pragma once
#include "tessera/placement/detail/tensor_spec.h"

#include <torch/nn/module.h>

#include <string>
#include <vector>

namespace tessera {

struct DistributedParameter {
  std::string name;
  SpecRef spec;
};

// PyTorch asks for this before DistributedDataParallel over a process group, to take distributed parameters apart. Here
// they stay what they are, and DDP reduces their pieces; this checks that all of them lie on meshes this rank is in,
// and says which they are.
std::vector<DistributedParameter> pre_dp_module_transform(const torch::nn::Module& module);

}  // namespace tessera
