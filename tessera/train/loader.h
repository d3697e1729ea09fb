#pragma once
#include "tessera/data/batch.h"
#include "tessera/data/prefetch.h"
#include "tessera/train/config.h"

namespace tessera::train {

// The data a config names. Throws UsageError for files that cannot be read, are empty, or too short.
data::Split open_data(const TrainConfig& config);

// A rank's share of a batch, and what all ranks know of the whole.
struct LoadedBatch {
  data::Batch batch;
  int64_t samples = 0;  // of the whole
  int64_t counted = 0;  // targets of the whole that count
};

// Reads the batches of one rank ahead of time.
class Loader {
 public:
  Loader(std::shared_ptr<const data::Dataset> dataset, const data::SamplerOptions& options, int64_t rank, int64_t ranks,
         size_t depth);
  LoadedBatch next();
  double seconds_waited() const { return seconds_waited_; }  // in the last next()

 private:
  double seconds_waited_ = 0;
  data::Prefetch<LoadedBatch> batches_;
};

}  // namespace tessera::train
