#pragma once
#include "tessera/placement/detail/tensor_spec.h"
#include "tessera/propagate/detail/op_entry.h"

#include <ATen/core/Tensor.h>

#include <vector>

// Redistribution of inputs that a decision needs in other placements. It is implicit communication, so CommPolicy
// applies.
namespace tessera::detail {

struct RedistributedInput {
  const at::Tensor* tensor;
  const TensorSpec* to;
  int index;         // among the call's tensors
  at::Tensor local;  // the result
};

// Communicates, and fills each `local`. Several inputs share collectives where they can. The result is cached in the
// DTensor, so that a value that two ops use is redistributed once.
void redistribute_all(const propagate::OpEntry& entry, std::vector<RedistributedInput>& inputs);

}  // namespace tessera::detail
