#pragma once
#include "tessera/data/dataset.h"
#include "tessera/train/detail/model_layout.h"
#include "tessera/train/detail/metrics.h"

namespace tessera::train {

// Loss and accuracy on the first `samples` of a data set, shared out over the data-parallel ranks. The same on all.
// An answer is right if each of its counted targets is the likeliest token after what is right before it: then going on
// from the question, always with the likeliest token, gives just this answer.
EvalMetrics evaluate(Layout& layout, const data::Dataset& dataset, int64_t samples, int64_t batch, at::Device device);

struct Sampling {
  int64_t count;           // tokens
  int64_t longest;         // that the model sees at a time
  double temperature = 0;  // 0: always the likeliest
  uint64_t seed = 0;
};
// Goes on with `prompt`; gives both. All ranks must call it, and all get the same.
std::vector<int64_t> generate(Layout& layout, std::vector<int64_t> prompt, const Sampling& how, at::Device device);

}  // namespace tessera::train
