#pragma once
#include "tessera/base/reduce_op.h"
#include "tessera/comm/communicator.h"

#include <ATen/core/Tensor.h>

// In-place collectives as registered ops; DDP's and FSDP's reducers use them. As with the functional collectives, the
// result is pending on its group until funcol::wait(x, group). They are recorded as Family::C10d.
namespace tessera::comm {

// tessera::all_reduce_(Tensor(a!) x, str op, Group group) -> Tensor(a!)
void all_reduce_(const at::Tensor& x, ReduceOp op, const Group& group);

// One collective for all tensors.
// tessera::all_reduce_coalesced_(Tensor(a!)[] xs, str op, Group group) -> ()
void all_reduce_coalesced_(at::TensorList xs, ReduceOp op, const Group& group);

// tessera::broadcast_(Tensor(a!) x, int source, Group group) -> Tensor(a!)
void broadcast_(const at::Tensor& x, int64_t source, const Group& group);

// Concatenates x of every rank into out. Requires: out.numel() == ranks * x.numel(), both contiguous.
// tessera::all_gather_into_(Tensor(a!) out, Tensor x, Group group) -> Tensor(a!)
void all_gather_into_(const at::Tensor& out, const at::Tensor& x, const Group& group);

// Reduces x over the ranks, and writes part `rank` of `ranks` equal parts into out.
// tessera::reduce_scatter_into_(Tensor(a!) out, Tensor x, str op, Group group) -> Tensor(a!)
void reduce_scatter_into_(const at::Tensor& out, const at::Tensor& x, ReduceOp op, const Group& group);

}  // namespace tessera::comm
