#pragma once
#include "tessera/propagate/detail/op_entry.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

// Parameters that are sharded to save memory only: an op that uses one next to plain tensors all-gathers it first and
// runs on plain tensors.
//
//   addmm(bias, x, weight.t())    x is plain, bias and weight are S(0) and marked: the op all-gathers both, and its
//                                 result is plain
//   weight.t(), optimizer steps   all inputs are DTensors: they run as on any other DTensor
//
// Backward does the same, since autograd saved the local shard. The gradient of a marked leaf arrives unsharded, and
// the code that marked the leaf reduces it. FSDP uses this for parameters of modules without hooks
// (data_parallel/fsdp/detail/engine/unhooked_modules.h).
namespace tessera::detail {

// Marks the storage of the local tensor of `t`, so views of `t` are marked too. The mark lives as long as the storage.
void mark_all_gather_on_use(const at::Tensor& t);

// If `args` has marked tensors and plain ones, has no other DTensors, and the op writes to no marked tensor: replaces
// the marked tensors by their global values and returns true.
bool all_gather_marked_inputs(const propagate::OpEntry& entry, c10::IValue* args);

}  // namespace tessera::detail
