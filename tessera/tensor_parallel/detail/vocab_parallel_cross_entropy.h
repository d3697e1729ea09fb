#pragma once
#include <ATen/core/Reduction.h>
#include <ATen/core/Tensor.h>

#include <cstdint>

namespace tessera {

// Those of torch::nn::functional::cross_entropy.
struct CrossEntropyOptions {
  at::Tensor weight = {};  // (C), the same on every rank, plain or distributed; none: all classes count alike
  at::Reduction::Reduction reduction = at::Reduction::Mean;
  int64_t ignore_index = -100;
  double label_smoothing = 0;
};

// Cross entropy of logits whose classes are cut, without gathering them: of each position only its maximum, its sum of
// exponentials and its target's logit travel. Differentiable (once).
//
//   logits   (N, C, d1, ...) or (C), distributed
//   target   (N, d1, ...) of classes: distributed over the same mesh, or plain and the same on every rank
//   result   distributed. Positions that are cut over other axes stay cut: reduction none lies as they do, sum and mean
//            are pending sums over those axes. The mean is that of the whole batch, not of means.
//
// Communicates, over each axis that cuts classes: 3 all-reduces of a number per position forward (maximum; target's
// logit; sums), none backward. The mean adds up its denominator over the axes that cut positions.
// Pieces may be uneven or empty. Plain logits get LibTorch's own cross entropy.
//
// Example:  auto logits = output(x);                                        // [S(2)] on tp, (batch, sequence,
// vocabulary)
//           auto loss = vocab_parallel_cross_entropy(logits.flatten(0, 1), targets.flatten());
at::Tensor vocab_parallel_cross_entropy(const at::Tensor& logits, const at::Tensor& target,
                                        const CrossEntropyOptions& options = {});

// The same for log-probabilities: 1 all-reduce forward. label_smoothing must be 0.
at::Tensor vocab_parallel_nll_loss(const at::Tensor& log_probs, const at::Tensor& target,
                                   const CrossEntropyOptions& options = {});

// Does some mesh axis cut the class dim of these scores? False for plain ones.
bool classes_are_sharded(const at::Tensor& scores);

}  // namespace tessera
