#pragma once
#include "tessera/dtensor/dtensor.h"

namespace tessera::models {

// Converts a plain `value`, which is the same on every rank, to a replicated DTensor on the mesh of `x` if `x` is
// distributed. Otherwise returns `value`.
inline at::Tensor replicate_like(const at::Tensor& x, const at::Tensor& value) {
  return is_dtensor(x) && !is_dtensor(value) ? at::Tensor(DTensor::from_local(value, DTensor(x).device_mesh())) : value;
}

}  // namespace tessera::models
