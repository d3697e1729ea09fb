#pragma once
#include "tessera/placement/detail/tensor_spec.h"
#include "tessera/propagate/detail/op_entry.h"

#include <ATen/core/Tensor.h>

#include <vector>

// Bringing inputs to where a decision wants them: implicit communication, and so under the policy.
namespace tessera::detail {

struct Moved {
  const at::Tensor* tensor;
  const TensorSpec* to;
  int index;  // among the call's tensors
  at::Tensor local;
};

// Fills each `local`. Several tensors share collectives where they can. A value that is used again is moved once.
void move_all(const propagate::OpEntry& entry, std::vector<Moved>& moves);

}  // namespace tessera::detail
