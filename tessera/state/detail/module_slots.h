#pragma once
#include <ATen/core/Tensor.h>

#include <functional>
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

// Each call of slots_of(module) calls `prepare(module)` first. For modules whose parameters have other values for a
// while: FSDP reshards them. Call it once per function.
void before_slots(std::function<void(const torch::nn::Module&)> prepare);

}  // namespace tessera::detail
