#pragma once
#include "tessera/dtensor/dtensor.h"

namespace tessera::detail {

// The full tensor of a DTensor (all ranks of its mesh must call it); a plain tensor itself.
inline at::Tensor full_tensor_or_self(const at::Tensor& t) { return is_dtensor(t) ? DTensor(t).full_tensor() : t; }

}  // namespace tessera::detail
