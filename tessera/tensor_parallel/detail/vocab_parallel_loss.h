#pragma once
#include "tessera/comm/communicator.h"
#include "tessera/placement/detail/tensor_spec.h"
#include "tessera/tensor_parallel/detail/local_class_ops.h"
#include "tessera/tensor_parallel/detail/vocab_parallel_cross_entropy.h"

#include <vector>

namespace tessera::detail {

// The checked arguments of a loss over sharded classes.
struct VocabParallelLoss {
  at::Tensor scores;                // logits or log-probabilities: distributed, not partial
  SpecRef position_spec;            // of a tensor with one value per position, with the placements of the scores
  LocalClasses classes;             // the classes of this rank
  std::vector<comm::Group> groups;  // of the mesh axes that shard the classes
  at::Tensor target;                // the local positions
  at::Tensor weight;                // of all classes, in the compute dtype; undefined: not given
  double smoothing;

  c10::ScalarType compute_dtype() const { return position_spec->dtype; }  // float for half and bfloat16
};

int64_t class_dim(const at::Tensor& scores);  // 0 for (C), 1 for (N, C, ...)

// Checks the arguments and redistributes them where necessary: partial scores, and a target or weight whose placements
// do not match the scores. Requires: scores are distributed. Throws UsageError, before any communication, for invalid
// arguments.
VocabParallelLoss prepare_loss(const char* op, const at::Tensor& scores, const at::Tensor& target,
                               const CrossEntropyOptions& options);

}  // namespace tessera::detail
