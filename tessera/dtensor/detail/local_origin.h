#pragma once
#include "tessera/placement/detail/tensor_spec.h"

#include <ATen/core/Tensor.h>

namespace tessera::detail {

// The spec of the nearest DTensor from whose to_local() the plain tensor `t` was computed, through any number of ops.
// It is found in the autograd graph. Null: `t` has no history, or no to_local() in it.
SpecRef local_origin(const at::Tensor& t);

}  // namespace tessera::detail
