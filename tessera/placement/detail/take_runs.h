#pragma once
#include "tessera/placement/detail/shard.h"

#include <ATen/core/Tensor.h>

namespace tessera {

// The given indices of one dim, in order, as a contiguous tensor of its own.
at::Tensor take_runs(const at::Tensor& t, int64_t dim, const Runs& runs);

}  // namespace tessera
