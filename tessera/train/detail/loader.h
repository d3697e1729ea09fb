#pragma once
#include "tessera/data/dataset.h"
#include "tessera/data/detail/prefetch.h"
#include "tessera/train/config.h"

#include <functional>
#include <memory>

namespace tessera::train {

// Opens the data of a config. Throws UsageError for files that cannot be read, are empty, or too short.
data::Split open_data(const TrainConfig& config);

// The rows of one rank, and facts about the global batch.
struct LoadedBatch {
  data::Batch batch;
  int64_t samples = 0;   // of the global batch
  int64_t counted = 0;   // targets of the global batch that count for the loss
  int64_t position = 0;  // of the sampler after this batch: the next batch starts there
};

// Reads the batches of one rank ahead of time.
class Loader {
 public:
  Loader(std::shared_ptr<const data::Dataset> dataset, const data::SamplerOptions& options, int64_t rank, int64_t ranks,
         size_t depth);
  LoadedBatch next();
  void set_position(int64_t position);                       // of the next batch
  double seconds_waited() const { return seconds_waited_; }  // in the last next()

 private:
  using Batches = data::Prefetch<LoadedBatch>;
  double seconds_waited_ = 0;
  std::function<std::unique_ptr<Batches>(int64_t position)> start_;
  std::unique_ptr<Batches> batches_;
};

}  // namespace tessera::train
