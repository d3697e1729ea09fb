#pragma once
#include <ATen/core/Tensor.h>

namespace tessera::models {

// The mean cross entropy of (B, T, vocab) logits and (B, T) targets. Half and bfloat16 logits are converted to float.
// Positions with target -100 do not count.
// Example:  models::loss(model(tokens), targets).backward();
at::Tensor loss(const at::Tensor& logits, const at::Tensor& targets);
// The sum instead of the mean, for callers that divide by the number of targets on all ranks.
// `reuse_logits`: nobody reads the logits after the backward, which may then write their gradient into their memory. On
// a GPU they are the largest tensor of a step.
at::Tensor loss_sum(const at::Tensor& logits, const at::Tensor& targets, bool reuse_logits = false);

}  // namespace tessera::models
