#pragma once
#include "tessera/state/detail/module_slots.h"
#include "tessera/state/load_state_dict.h"
#include "tessera/state/optimizer_state.h"

#include <string>
#include <vector>

// The functions of load_state_dict.h and optimizer_state.h with explicit slots. FSDP uses them: a flat parameter
// replaces the parameters of its modules, and each slot has a tensor with the name and sizes of an original parameter.
namespace tessera::detail {

// The values to load, and the names that do not fit.
struct LoadPlan {
  struct Load {
    size_t slot;
    at::Tensor value;
  };
  std::vector<Load> loads;
  LoadReport report;
};

// Compares the names and sizes of slots and dict. Changes nothing. Throws UsageError if `strict` and something does not
// fit.
LoadPlan plan_load(const torch::nn::Module& module, const std::vector<ModuleSlot>& slots, const StateDict& dict,
                   bool strict);
// Loads one value as load_state_dict does.
void load_value(const at::Tensor& into, const at::Tensor& value, bool assign);

// The functions of optimizer_state.h. `where` is the name of the module of the slots, for errors.
StateDict optimizer_state_dict(OptimizerAccess& optimizer, const std::vector<ModuleSlot>& slots,
                               const std::string& where);
LoadReport load_optimizer_state_dict(OptimizerAccess& optimizer, const std::vector<ModuleSlot>& slots,
                                     const std::string& where, const StateDict& dict, LoadOptions options);

}  // namespace tessera::detail
