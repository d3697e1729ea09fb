#pragma once
#include "tessera/comm/communicator.h"

#include <ATen/core/Tensor.h>

#include <optional>

namespace tessera::detail {

// The parameters, buffers and options of a batch norm module. Undefined tensors: not affine, or no running statistics.
struct BatchNormParts {
  int64_t num_features = 0;
  at::Tensor weight, bias;
  at::Tensor running_mean, running_var, num_batches_tracked;
  std::optional<double> momentum;  // none: cumulative average
  double eps = 0;
};

// Batch norm in training mode over the local batches of all ranks of `group`. For its communication see
// data_parallel/sync_batch_norm.h. Throws UsageError, and changes nothing, if `x` is not (N, num_features, ...) or if
// the global batch has only one value per channel.
at::Tensor group_batch_norm(const at::Tensor& x, const BatchNormParts& parts, const comm::Group& group);

}  // namespace tessera::detail
