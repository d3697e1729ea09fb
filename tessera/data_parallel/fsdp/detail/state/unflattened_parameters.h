#pragma once
#include "tessera/data_parallel/fsdp/detail/engine/sharded_module.h"
#include "tessera/state/detail/module_slots.h"

#include <memory>
#include <vector>

namespace tessera::data_parallel::fsdp {

// A parameter of a group with a flat layout.
struct FlatParamRef {
  std::shared_ptr<ShardedModule> sharded = {};  // null: the tensor is not part of a flat parameter
  size_t index = 0;

  const ParamGroup& group() const { return sharded->group(); }
  const FSDPParam& param() const { return group().params()[index]; }
};

// The names, parameters and buffers of a module as before flattening, for state dicts. The slot of a flattened
// parameter has a meta tensor of the parameter's shape and unsharded_spec. The constructor reshards all groups.
struct UnflattenedParameters {
  explicit UnflattenedParameters(torch::nn::Module& module);

  std::vector<tessera::detail::ModuleSlot> slots;
  std::vector<FlatParamRef> flat_refs;                       // per slot
  std::vector<std::shared_ptr<ShardedModule>> flat_modules;  // modules with a flat layout, outer ones first
  std::vector<Tensors> meta_params;                          // the meta tensors, per flat module and parameter
};

// Converts values to the form in which a state dict has them.
struct StateDictForm {
  bool full, to_cpu;

  // For a value that is not flattened. Returns an alias of `value` if possible.
  at::Tensor convert(const at::Tensor& value) const;
  // For a flattened parameter: `unsharded` is this rank's local tensor of it. All ranks call it in the same order.
  at::Tensor convert_flat(const ShardedModule& sharded, const FSDPParam& param, const at::Tensor& unsharded) const;
};

}  // namespace tessera::data_parallel::fsdp
