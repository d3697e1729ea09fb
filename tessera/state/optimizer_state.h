#pragma once
#include "tessera/state/load_state_dict.h"
#include "tessera/state/state_dict.h"

#include <concepts>
#include <memory>
#include <string>
#include <vector>

namespace torch::optim {
class Optimizer;
}

namespace tessera {

// What an optimizer says of itself so that it can be saved and loaded. LibTorch's SGD, Adam, AdamW, RMSprop and Adagrad
// are known; another implements this, and if it is a torch::optim::Optimizer too it is found by itself.
// Numbers travel as tensors without dims: doubles as kDouble, integers as kLong, bools as kBool.
class OptimizerAccess {
 public:
  struct StateEntry {
    std::string name;            // "exp_avg"; no dots
    bool like_parameter = true;  // has the parameter's sizes, and is laid out as it is; else it is plain
    bool required = true;        // of a parameter that has any state_entries
    bool operator==(const StateEntry&) const = default;
  };
  virtual ~OptimizerAccess() = default;
  virtual std::string kind() const = 0;  // "AdamW"
  virtual std::vector<std::vector<at::Tensor>> groups() const = 0;
  virtual StateDict options(size_t group) const = 0;  // lr, betas, ...
  virtual void set_options(size_t group, const StateDict& options) = 0;
  // UsageError for values that set_options would refuse: asked for every group before anything is loaded.
  virtual void check_options(size_t /*group*/, const StateDict& /*options*/) const {}
  virtual std::vector<StateEntry> state_entries() const = 0;
  virtual bool has_state_before_first_step() const { return false; }            // else the first step makes them
  virtual StateDict state(const at::Tensor& parameter) const = 0;           // aliases; empty before the first step
  virtual void set_state(const at::Tensor& parameter, StateDict state_entries) = 0;  // keeps the tensors; empty: forgets all
  // Another number after each change of which tensors the state is, of parameters, or of options other than the
  // learning rate: what a compiled step was made for.
  virtual uint64_t generation() const { return 0; }
};
// Throws UsageError for an optimizer that is not known. Requires: the optimizer outlives it.
std::shared_ptr<OptimizerAccess> access_to(torch::optim::Optimizer& optimizer);

// State and options of an optimizer, by the names its parameters have in the module, not by their numbers: so it can be
// loaded where parameters are grouped, ordered or laid out otherwise. Of a shared parameter the first name counts.
// Gives aliases, as state_dict does; distributed state stays distributed. No communication.
//
//   state.layers.0.weight.step       Long[]            param_groups.0.lr      Double[]
//   state.layers.0.weight.exp_avg    Float[16, 10]     param_groups.0.betas   Double[2]
StateDict optimizer_state_dict(OptimizerAccess& optimizer, const torch::nn::Module& module);
StateDict optimizer_state_dict(torch::optim::Optimizer& optimizer, const torch::nn::Module& module);

// The other way. All names and shapes are checked first: where this throws UsageError, nothing was changed.
// Tensors like the parameter are laid out as it is, as load_state_dict does, and keep their dtype; the optimizer gets
// copies. A parameter without state_entries in the dict had made no step: its state is forgotten, unless strict is off.
// `assign` takes the tensors themselves where they already lie so.
LoadReport load_optimizer_state_dict(OptimizerAccess& optimizer, const torch::nn::Module& module, const StateDict& dict,
                                     LoadOptions options = {});
LoadReport load_optimizer_state_dict(torch::optim::Optimizer& optimizer, const torch::nn::Module& module,
                                     const StateDict& dict, LoadOptions options = {});

// For a class that is an OptimizerAccess and a torch::optim::Optimizer: else neither overload would be the better one.
template <std::derived_from<OptimizerAccess> Optimizer>
StateDict optimizer_state_dict(Optimizer& optimizer, const torch::nn::Module& module) {
  return optimizer_state_dict(static_cast<OptimizerAccess&>(optimizer), module);
}
template <std::derived_from<OptimizerAccess> Optimizer>
LoadReport load_optimizer_state_dict(Optimizer& optimizer, const torch::nn::Module& module, const StateDict& dict,
                                     LoadOptions options = {}) {
  return load_optimizer_state_dict(static_cast<OptimizerAccess&>(optimizer), module, dict, options);
}

}  // namespace tessera
