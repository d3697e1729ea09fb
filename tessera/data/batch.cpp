#include "tessera/data/dataset.h"

#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

namespace tessera::data {

Batch read_batch(const Dataset& dataset, const std::vector<int64_t>& rows) {
  const auto count = static_cast<int64_t>(rows.size()), length = dataset.length();
  Batch batch{at::zeros({count, length}, at::kLong), at::full({count, length}, kIgnored, at::kLong)};
  const auto row_span = [&](const at::Tensor& t, int64_t i) {
    return std::span(t.mutable_data_ptr<int64_t>() + i * length, static_cast<size_t>(length));
  };
  for (int64_t i = 0; i < count; i++)
    if (const int64_t sample = rows[static_cast<size_t>(i)]; sample != kPadding)
      dataset.read(sample, row_span(batch.input, i), row_span(batch.target, i));
  return batch;
}

}  // namespace tessera::data
