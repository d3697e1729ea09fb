#pragma once
#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

namespace torch::nn {
class Module;
}

namespace tessera::detail {

// A place in a module that a tensor is kept in: a parameter or a buffer.
struct ModuleSlot {
  std::string name;  // from the root: "layers.0.attn.wq.weight"
  at::Tensor tensor;
  const torch::nn::Module* owner;
};

// All of a module, in the order of its state dict; shared tensors once for each name, undefined ones left out.
std::vector<ModuleSlot> slots_of(const torch::nn::Module& module);

}  // namespace tessera::detail
