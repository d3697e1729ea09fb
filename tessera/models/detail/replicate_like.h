#pragma once
#include "tessera/dtensor/dtensor.h"

namespace tessera::models {

// A value that is the same on every rank, made to go with `x`: whole on x's mesh if x is distributed and it is not,
// else itself.
inline at::Tensor replicate_like(const at::Tensor& x, const at::Tensor& value) {
  return is_dtensor(x) && !is_dtensor(value) ? at::Tensor(DTensor::from_local(value, DTensor(x).device_mesh())) : value;
}

}  // namespace tessera::models
