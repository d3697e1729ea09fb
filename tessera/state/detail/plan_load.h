#pragma once
#include "tessera/state/detail/module_slots.h"
#include "tessera/state/load_state_dict.h"
#include "tessera/state/optimizer_state.h"

#include <string>
#include <vector>

// load_state_dict and the like, for those who know better than the module what its tensors are: where a sharded module
// keeps something else, a slot's tensor stands for the one that its name means, and has its sizes.
namespace tessera::detail {

struct LoadPlan {
  struct Load {
    size_t slot;
    at::Tensor value;
  };
  std::vector<Load> loads;
  LoadReport report;
};

// What is to be loaded, and what does not fit; UsageError if something does not, and that is not allowed. Changes
// nothing.
LoadPlan plan_load(const torch::nn::Module& module, const std::vector<ModuleSlot>& slots, const StateDict& dict,
                   bool strict);
void load_value(const at::Tensor& into, const at::Tensor& value, bool assign);

// As the ones without slots (nn/optimizer_state.h). `where`: what the slots are of, for errors.
StateDict optimizer_state_dict(OptimizerAccess& optimizer, const std::vector<ModuleSlot>& slots,
                               const std::string& where);
LoadReport load_optimizer_state_dict(OptimizerAccess& optimizer, const std::vector<ModuleSlot>& slots,
                                     const std::string& where, const StateDict& dict, LoadOptions options);

}  // namespace tessera::detail
