#pragma once
#include "tessera/dtensor/dtensor.h"

namespace tessera::compiler {

// What programs work on: this rank's piece of a distributed tensor, another tensor itself.
inline const at::Tensor& plain_of(const at::Tensor& t) { return is_dtensor(t) ? tessera::detail::local_of(t) : t; }

}  // namespace tessera::compiler
