#include "tessera/data/sampler.h"

#include "tessera/base/error.h"
#include "tessera/data/detail/permutation.h"
#include "tessera/data/detail/splitmix64.h"

#include <algorithm>

namespace tessera::data {

int64_t GlobalBatch::samples() const {
  return std::count_if(rows.begin(), rows.end(), [](int64_t row) { return row != kPadding; });
}

std::vector<int64_t> GlobalBatch::rows_of(int64_t rank, int64_t ranks) const {
  const auto all = static_cast<int64_t>(rows.size());
  TESSERA_CHECK(ranks >= 1 && rank >= 0 && rank < ranks, UsageError, "rows_of: rank ", rank, " of ", ranks,
                " ranks; the rank must be less than the number of ranks");
  TESSERA_CHECK(all % ranks == 0, UsageError, "a batch of ", all, " samples is not divisible by ", ranks,
                " data-parallel ranks; choose a multiple of ", ranks);
  const auto first = rows.begin() + rank * (all / ranks);
  return {first, first + all / ranks};
}

Sampler::Sampler(const SamplerOptions& options) : options_(options) {
  TESSERA_CHECK(options.batch >= 1, UsageError, "the batch size is ", options.batch, "; it must be at least 1");
  TESSERA_CHECK(options.samples == kEndless || options.samples >= 1, UsageError, "the dataset has ", options.samples,
                " samples; it must have at least 1");
  TESSERA_CHECK(options.samples == kEndless || options.last == LastBatch::Pad || options.samples >= options.batch,
                UsageError, "the dataset has ", options.samples, " samples, which never fill a batch of ",
                options.batch, "; use a smaller batch, shorter sequences, or LastBatch::Pad");
}

void Sampler::set_position(int64_t position) {
  TESSERA_CHECK(position >= 0, UsageError, "Sampler::set_position: position is ", position, "; it must be at least 0");
  position_ = position;
}

GlobalBatch Sampler::next() {
  GlobalBatch batch;
  batch.rows.reserve(static_cast<size_t>(options_.batch));
  if (options_.samples == kEndless) {
    for (int64_t i = 0; i < options_.batch; i++) batch.rows.push_back(position_++);
    return batch;
  }
  const int64_t left = options_.samples - position_ % options_.samples;
  if (options_.last == LastBatch::Drop && left < options_.batch) position_ += left;
  batch.epoch = position_ / options_.samples;
  const int64_t first = position_ % options_.samples;
  const int64_t count = std::min(options_.batch, options_.samples - first);
  const Permutation order(options_.samples, splitmix64(options_.seed, static_cast<uint64_t>(batch.epoch)));
  for (int64_t i = first; i < first + count; i++) batch.rows.push_back(options_.shuffle ? order(i) : i);
  batch.rows.resize(static_cast<size_t>(options_.batch), kPadding);
  position_ += count;
  return batch;
}

}  // namespace tessera::data
