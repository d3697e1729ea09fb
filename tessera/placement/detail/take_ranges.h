#pragma once
#include "tessera/placement/detail/shard.h"

#include <ATen/core/Tensor.h>

namespace tessera {

// The given index ranges of one dim, in order, as a new contiguous tensor.
at::Tensor take_ranges(const at::Tensor& t, int64_t dim, const IndexRanges& ranges);

}  // namespace tessera
