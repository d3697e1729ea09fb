#pragma once
#include "tessera/data/dataset.h"
#include "tessera/train/detail/metrics.h"
#include "tessera/train/detail/parallel_model.h"

namespace tessera::train {

// Loss and exact-match accuracy on the first `samples` of a dataset, split over the data-parallel ranks. Returns the
// same on all ranks. A sample matches if argmax predicts each of its counted targets (teacher forcing); greedy
// generation from the prompt then gives exactly this answer.
EvalMetrics evaluate(ParallelModel& model, const data::Dataset& dataset, int64_t samples, int64_t batch,
                     at::Device device);

// What validation on this dataset measures.
EvalKind eval_kind(const data::Dataset& dataset);

struct GenerateOptions {
  int64_t tokens;          // to generate
  int64_t context;         // tokens that the model sees at a time
  double temperature = 0;  // 0: greedy
  uint64_t seed = 0;
};
// Appends generated tokens to `prompt`. All ranks must call it, and all return the same.
std::vector<int64_t> generate(ParallelModel& model, std::vector<int64_t> prompt, const GenerateOptions& options,
                              at::Device device);

}  // namespace tessera::train
