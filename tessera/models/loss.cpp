#include "tessera/models/loss.h"

#include "tessera/base/error.h"
#include "tessera/cuda/detail/cross_entropy.h"
#include "tessera/dtensor/dtensor.h"

#include <ATen/core/Reduction.h>
#include <ATen/ops/cross_entropy_loss.h>

namespace tessera::models {

namespace {

at::Tensor reduced_loss(const at::Tensor& logits, const at::Tensor& targets, at::Reduction::Reduction reduction,
                        bool reuse_logits) {
  TESSERA_CHECK(logits.dim() == 3 && targets.sizes() == logits.sizes().slice(0, 2), UsageError,
                "loss takes logits (B, T, vocab) and targets (B, T); found sizes ", logits.sizes(), " and ",
                targets.sizes());
  if (is_dtensor(logits) && DTensor(logits).device_mesh().size() == 1) {  // the local tensors are the global ones
    const DTensor distributed(logits);
    const auto value = reduced_loss(distributed.to_local(), is_dtensor(targets) ? DTensor(targets).to_local() : targets,
                                    reduction, reuse_logits);
    return DTensor::from_local(value, distributed.device_mesh());
  }
  if (!is_dtensor(logits) && cuda::has_cross_entropy(logits)) {
    const auto rows = cuda::cross_entropy_rows(logits.flatten(0, 1), targets.flatten(), -100, reuse_logits);
    if (reduction == at::Reduction::Sum) return rows.sum();
    return rows.sum() / targets.ne(-100).sum();
  }
  const bool low_precision = logits.scalar_type() == at::kHalf || logits.scalar_type() == at::kBFloat16;
  const auto precise = low_precision ? logits.to(at::kFloat) : logits;
  return at::cross_entropy_loss(precise.flatten(0, 1), targets.flatten(), {}, reduction);
}

}  // namespace

at::Tensor loss(const at::Tensor& logits, const at::Tensor& targets) {
  return reduced_loss(logits, targets, at::Reduction::Mean, false);
}

at::Tensor loss_sum(const at::Tensor& logits, const at::Tensor& targets, bool reuse_logits) {
  return reduced_loss(logits, targets, at::Reduction::Sum, reuse_logits);
}

}  // namespace tessera::models
