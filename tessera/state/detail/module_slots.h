#pragma once
#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

namespace torch::nn {
class Module;
}

namespace tessera::detail {

// A parameter or buffer of a module.
struct ModuleSlot {
  std::string name;  // the full name: "layers.0.attn.wq.weight"
  at::Tensor tensor;
  const torch::nn::Module* owner;
};

// All parameters and buffers, in the order of state_dict(). Shared tensors appear once per name. Undefined tensors are
// omitted.
std::vector<ModuleSlot> slots_of(const torch::nn::Module& module);

}  // namespace tessera::detail
