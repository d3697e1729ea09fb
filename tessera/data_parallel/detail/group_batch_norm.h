#pragma once
#include "tessera/comm/communicator.h"

#include <ATen/core/Tensor.h>

#include <optional>

namespace tessera::detail {

// What a batch norm is made of, whatever its class. Undefined: not affine; statistics are not tracked.
struct BatchNormParts {
  int64_t num_features = 0;
  at::Tensor weight, bias;
  at::Tensor running_mean, running_var, num_batches_tracked;
  std::optional<double> momentum;  // none: each batch counts alike
  double eps = 0;
};

// Batch norm in training mode over the parts of a batch that the ranks of `group` have. What it sends is told in
// data_parallel/sync_batch_norm.h. UsageError, with nothing changed, if `x` is not (N, num_features, ...) or the whole
// batch has but one value a channel.
at::Tensor group_batch_norm(const at::Tensor& x, const BatchNormParts& parts, const comm::Group& group);

}  // namespace tessera::detail
