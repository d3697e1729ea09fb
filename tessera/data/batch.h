#pragma once
#include "tessera/data/dataset.h"

#include <ATen/core/Tensor.h>

namespace tessera::data {

// The samples that one rank reads for a step.
struct Batch {
  at::Tensor input, target;  // (rows, length), kLong; padding rows have input 0 and target kIgnored
};

// Reads the samples `rows` (with kPadding for padding rows), as GlobalBatch::rows_of returns them.
Batch read_batch(const Dataset& dataset, const std::vector<int64_t>& rows);

}  // namespace tessera::data
