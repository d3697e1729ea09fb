#pragma once
#include "tessera/data/batch.h"
#include "tessera/data/detail/prefetch.h"
#include "tessera/train/config.h"

#include <functional>
#include <memory>

namespace tessera::train {

// The data a config names. Throws UsageError for files that cannot be read, are empty, or too short.
data::Split open_data(const TrainConfig& config);

// A rank's share of a batch, and what all ranks know of the whole.
struct LoadedBatch {
  data::Batch batch;
  int64_t samples = 0;   // of the whole
  int64_t counted = 0;   // targets of the whole that count
  int64_t position = 0;  // of the sampler behind it: where the next one begins
};

// Reads the batches of one rank ahead of time.
class Loader {
 public:
  Loader(std::shared_ptr<const data::Dataset> dataset, const data::SamplerOptions& options, int64_t rank, int64_t ranks,
         size_t depth);
  LoadedBatch next();
  void set_position(int64_t position);                       // the next batch begins there
  double seconds_waited() const { return seconds_waited_; }  // in the last next()

 private:
  using Batches = data::Prefetch<LoadedBatch>;
  double seconds_waited_ = 0;
  std::function<std::unique_ptr<Batches>(int64_t position)> start_;
  std::unique_ptr<Batches> batches_;
};

}  // namespace tessera::train
