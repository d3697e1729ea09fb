#pragma once
#include "tessera/comm/communicator.h"
#include "tessera/placement/detail/tensor_spec.h"
#include "tessera/tensor_parallel/detail/local_class_ops.h"
#include "tessera/tensor_parallel/detail/vocab_parallel_cross_entropy.h"

#include <vector>

namespace tessera::detail {

// A loss over cut classes, checked and laid out.
struct VocabParallelLoss {
  at::Tensor scores;                // distributed, with no pending sum
  SpecRef placed;                   // of one number a position: lies as the scores do, without the classes
  LocalClasses piece;                 // the classes of this rank
  std::vector<comm::Group> groups;  // of the axes that cut classes
  at::Tensor target;                // this rank's positions
  at::Tensor weight;                // all classes', in the type of the computation; undefined: none was given
  double smoothing;

  c10::ScalarType type() const { return placed->dtype; }  // of the computation: float for half
};

int64_t class_dim(const at::Tensor& scores);  // (C), or (N, C, ...)

// Requires: scores are distributed. Throws UsageError, before anything is communicated, for arguments that do not go
// together. Communicates only where scores are a pending sum over another axis, or target or weight lie otherwise than
// the scores ask.
VocabParallelLoss pose(const char* op, const at::Tensor& scores, const at::Tensor& target, const CrossEntropyOptions& options);

}  // namespace tessera::detail
