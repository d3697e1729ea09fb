#pragma once
#include "tessera/state/load_state_dict.h"
#include "tessera/state/optimizer_state.h"
#include "tessera/state/state_dict.h"

#include <torch/nn/module.h>

#include <concepts>

// State dicts of modules and optimizers (PyTorch: torch.distributed.checkpoint.state_dict), for plain, DDP, FSDP and
// tensor parallel modules. Names and shapes are those before sharding and wrapping, without the "module." of wrappers,
// so that a dict that was saved on one mesh can be loaded on another mesh or into a plain module.
//
//   full       all values are full plain tensors
//   sharded    sharded values are DTensors. With fully_shard: the parameter itself. With FullyShardedDataParallel:
//              [S(0)] on its mesh, [R, S(0)] with a hybrid strategy. With tensor parallelism too: S(0) on the FSDP axis
//              and the tensor-parallel placement on the other axis; SS if both shard dim 0. A flat parameter is
//              gathered, one module at a time, and sharded.
//
// The optimizer dict has state.<parameter>.<entry> and param_groups.<group>.<option> (state/optimizer_state.h). State
// of a flat parameter is split by its parameters' names.
// All ranks call these functions together: they communicate.
namespace tessera {

// Options, with PyTorch's names.
struct StateDictOptions {
  bool full_state_dict = false;       // full tensors instead of DTensors
  bool cpu_offload = false;           // values are copied to the CPU
  bool rank0_only = false;            // with full_state_dict: other ranks get an empty dict
  bool strict = true;                 // loading: a missing or unexpected name or a wrong shape is an error
  bool broadcast_from_rank0 = false;  // loading: takes the full dict of rank 0 and ignores those of other ranks
};

// Returns the parameters and buffers. Flat parameters are copied, and with full_state_dict all values. Other values are
// aliases, as in state_dict().
StateDict get_model_state_dict(torch::nn::Module& module, const StateDictOptions& options = {});
// Loads plain values (equal on all ranks) and DTensors of any mesh. Names and shapes are checked first: if it throws
// UsageError, nothing was changed.
LoadReport set_model_state_dict(torch::nn::Module& module, const StateDict& dict, const StateDictOptions& options = {});

// The state of an optimizer, saved and loaded by parameter names. See above for the format.
StateDict get_optimizer_state_dict(OptimizerAccess& optimizer, torch::nn::Module& module,
                                   const StateDictOptions& options = {});
LoadReport set_optimizer_state_dict(OptimizerAccess& optimizer, torch::nn::Module& module, const StateDict& dict,
                                    const StateDictOptions& options = {});
// The same for LibTorch's optimizers.
StateDict get_optimizer_state_dict(torch::optim::Optimizer& optimizer, torch::nn::Module& module,
                                   const StateDictOptions& options = {});
LoadReport set_optimizer_state_dict(torch::optim::Optimizer& optimizer, torch::nn::Module& module,
                                    const StateDict& dict, const StateDictOptions& options = {});

// The same for a class that is an OptimizerAccess and a torch::optim::Optimizer: the overloads above are ambiguous.
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
