#pragma once
#include "tessera/data/dataset.h"

#include <ATen/core/Tensor.h>

namespace tessera::data {

// What one rank reads for a step.
struct Batch {
  at::Tensor input, target;  // (rows, length) of kLong; rows of padding are zeros and kIgnored
};

Batch read_batch(const Dataset& dataset, const std::vector<int64_t>& rows);

}  // namespace tessera::data
