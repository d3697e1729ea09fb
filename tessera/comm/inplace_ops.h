#pragma once
#include "tessera/base/reduce_op.h"
#include "tessera/comm/communicator.h"

#include <ATen/core/Tensor.h>

// Collectives that write into memory the caller keeps, as registered ops: what reducers are made of. As with those of
// ops.h, the result is pending on its group until wait(x, group). Recorded as family C10d.
namespace tessera::comm {

// tessera::all_reduce_(Tensor(a!) x, str op, Group group) -> Tensor(a!)
void all_reduce_(const at::Tensor& x, ReduceOp op, const Group& group);

// tessera::broadcast_(Tensor(a!) x, int source, Group group) -> Tensor(a!)
void broadcast_(const at::Tensor& x, int64_t source, const Group& group);

}  // namespace tessera::comm
