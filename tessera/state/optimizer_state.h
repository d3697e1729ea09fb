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

// State dicts of optimizers, with the parameters' names as keys (as in torch.distributed.checkpoint.state_dict, not the
// parameter numbers of Optimizer.state_dict()).
namespace tessera {

// The interface that an optimizer implements to be saved and loaded. Tessera implements it for LibTorch's SGD, Adam,
// AdamW, RMSprop and Adagrad, and its own optimizers derive from it. access_to() finds it in other optimizers that
// derive from both torch::optim::Optimizer and OptimizerAccess. Numbers are tensors without dims: doubles as kDouble,
// integers as kLong, bools as kBool.
class OptimizerAccess {
 public:
  // One entry of the state of a parameter, such as exp_avg.
  struct StateEntry {
    std::string name;            // "exp_avg"; without dots
    bool like_parameter = true;  // has the parameter's sizes and placements; false: a plain tensor
    bool required = true;        // exists for every parameter that has state
    bool operator==(const StateEntry&) const = default;
  };
  virtual ~OptimizerAccess() = default;
  virtual std::string kind() const = 0;                             // the class, such as "AdamW"
  virtual std::vector<std::vector<at::Tensor>> groups() const = 0;  // the parameters of each param_group
  virtual StateDict options(size_t group) const = 0;                // lr, betas, ...
  virtual void set_options(size_t group, const StateDict& options) = 0;
  // Throws UsageError for values that set_options does not accept. Called for every group before anything is loaded.
  virtual void check_options(size_t /*group*/, const StateDict& /*options*/) const {}
  virtual std::vector<StateEntry> state_entries() const = 0;  // what state() may contain
  virtual bool has_state_before_first_step() const { return false; }
  // The state of a parameter, as aliases. Empty before the first step, unless has_state_before_first_step().
  virtual StateDict state(const at::Tensor& parameter) const = 0;
  // Sets the state of a parameter to these tensors. An empty dict removes the state.
  virtual void set_state(const at::Tensor& parameter, StateDict state) = 0;
  // Changes whenever the state tensors, the parameters, or options other than the learning rate are replaced. A
  // compiled step is valid for one generation.
  virtual uint64_t generation() const { return 0; }
};
// The OptimizerAccess of an optimizer. Throws UsageError for an unknown class. Requires: the optimizer outlives it.
std::shared_ptr<OptimizerAccess> access_to(torch::optim::Optimizer& optimizer);

// The state and options of an optimizer. Keys use the names of the parameters in the module. So the dict can be loaded
// into an optimizer with other groups, another order, or other placements. A shared parameter uses its first name.
// Returns aliases, as state_dict does. Distributed state stays distributed. No communication.
//
//   state.layers.0.weight.step       Long[]            param_groups.0.lr      Double[]
//   state.layers.0.weight.exp_avg    Float[16, 10]     param_groups.0.betas   Double[2]
StateDict optimizer_state_dict(OptimizerAccess& optimizer, const torch::nn::Module& module);
StateDict optimizer_state_dict(torch::optim::Optimizer& optimizer, const torch::nn::Module& module);

// Loads a dict of optimizer_state_dict. Checks all names and sizes first: if it throws UsageError, nothing has changed.
// State that has the parameter's sizes gets the parameter's placements, as in load_state_dict, and keeps its dtype. The
// optimizer gets copies; with `assign` it gets the tensors of the dict if they need no redistribution. If the dict has
// no state for a parameter, its state is removed, unless strict is false.
LoadReport load_optimizer_state_dict(OptimizerAccess& optimizer, const torch::nn::Module& module, const StateDict& dict,
                                     LoadOptions options = {});
LoadReport load_optimizer_state_dict(torch::optim::Optimizer& optimizer, const torch::nn::Module& module,
                                     const StateDict& dict, LoadOptions options = {});

// Overloads for classes that derive from both OptimizerAccess and torch::optim::Optimizer, where the ones above are
// ambiguous.
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
