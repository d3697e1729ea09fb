#pragma once
#include "tessera/state/load_state_dict.h"
#include "tessera/state/optimizer_state.h"
#include "tessera/state/state_dict.h"

#include <torch/nn/module.h>

#include <concepts>

// State dicts of modules that may be sharded, in any way or not at all, and of their optimizers: under the names that
// parameters had before, with their shapes, whoever cut them. What one mesh has saved, another loads, and so does a
// plain module.
//
//   full       whole plain tensors
//   sharded    what is cut is a distributed tensor, of which each rank has a piece. fully_shard: the parameter itself.
//              FullyShardedDataParallel: [S(0)] on its mesh, [R, S(0)] for the hybrid strategies; times tensor parallel
//              [S(0), its own] on both axes, with SS where both cut dim 0. A flat parameter is gathered, one unit at a
//              time, and cut anew.
//
// Of an optimizer, state.<parameter>.<row> and param_groups.<group>.<option> (nn/optimizer_state.h): state of a flat
// parameter is cut by its parameters' names.
// All ranks call these together: they communicate.
namespace tessera {

struct StateDictOptions {
  bool full_state_dict = false;
  bool cpu_offload = false;  // values are brought to the CPU
  bool rank0_only = false;   // with full_state_dict: the others get an empty dict
  bool strict = true;        // loading: anything that does not fit is an error; else it is reported
  // Loading: the dict is full, and the first rank's counts; the others' are not looked at.
  bool broadcast_from_rank0 = false;
};

// Gives copies of what is flat or (full) of everything, and aliases of the rest, as state_dict() does.
StateDict get_model_state_dict(torch::nn::Module& module, const StateDictOptions& options = {});
// Takes plain values (the same on all ranks) and distributed ones, of any mesh. All names and shapes are checked first:
// where this throws UsageError, nothing was changed.
LoadReport set_model_state_dict(torch::nn::Module& module, const StateDict& dict, const StateDictOptions& options = {});

StateDict get_optimizer_state_dict(OptimizerAccess& optimizer, torch::nn::Module& module,
                                   const StateDictOptions& options = {});
LoadReport set_optimizer_state_dict(OptimizerAccess& optimizer, torch::nn::Module& module, const StateDict& dict,
                                    const StateDictOptions& options = {});
// For LibTorch's optimizers.
StateDict get_optimizer_state_dict(torch::optim::Optimizer& optimizer, torch::nn::Module& module,
                                   const StateDictOptions& options = {});
LoadReport set_optimizer_state_dict(torch::optim::Optimizer& optimizer, torch::nn::Module& module,
                                    const StateDict& dict, const StateDictOptions& options = {});

// For a class that is an OptimizerAccess and a torch::optim::Optimizer: else neither overload would be the better one.
template <std::derived_from<OptimizerAccess> Optimizer>
StateDict get_optimizer_state_dict(Optimizer& optimizer, torch::nn::Module& module,
                                   const StateDictOptions& options = {}) {
  return get_optimizer_state_dict(static_cast<OptimizerAccess&>(optimizer), module, options);
}
template <std::derived_from<OptimizerAccess> Optimizer>
LoadReport set_optimizer_state_dict(Optimizer& optimizer, torch::nn::Module& module, const StateDict& dict,
                                    const StateDictOptions& options = {}) {
  return set_optimizer_state_dict(static_cast<OptimizerAccess&>(optimizer), module, dict, options);
}

}  // namespace tessera
