#pragma once
#include <ATen/core/Tensor.h>

namespace tessera::models {

// The mean cross entropy of (B, T, vocab) logits and (B, T) targets, computed in float at least. Targets of -100 do not
// count.
at::Tensor loss(const at::Tensor& logits, const at::Tensor& targets);
// Their sum, for those who know better how many targets there are: over all ranks, say.
at::Tensor loss_sum(const at::Tensor& logits, const at::Tensor& targets);

}  // namespace tessera::models
