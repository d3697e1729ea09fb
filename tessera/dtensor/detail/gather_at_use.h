#pragma once
#include "tessera/propagate/detail/op_entry.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

// Tensors that are cut to save memory, not work: beside plain tensors they are whole, each time they are used.
//
//   addmm(bias, x, weight.t())    x plain, bias and weight S(0) and marked: both are gathered, the op runs on plain
//                                 tensors, its result is plain
//   weight.t(), optimizer steps   all distributed: as ever
//
// In backward the same: what was saved is the piece. A gradient comes to a marked leaf whole, and is its owner's to
// reduce. It is how parameters of modules without hooks are sharded (data_parallel/fsdp/unhooked.h).
namespace tessera::detail {

// Marks the memory of this rank's piece of `t`, so views of it count as well. It lasts as long as that memory.
void mark_gather_at_use(const at::Tensor& t);

// If `args` has marked tensors, plain ones, no other distributed ones, and the op writes to no marked one: puts the
// whole in the place of the marked ones.
bool gather_marked(const propagate::OpEntry& entry, c10::IValue* args);

}  // namespace tessera::detail
