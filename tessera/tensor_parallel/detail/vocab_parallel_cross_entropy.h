#pragma once
#include <ATen/core/Reduction.h>
#include <ATen/core/Tensor.h>

#include <cstdint>

namespace tessera {

// The options of torch::nn::functional::cross_entropy.
struct CrossEntropyOptions {
  at::Tensor weight = {};  // (C), the same on every rank, plain or distributed; undefined: all classes have weight 1
  at::Reduction::Reduction reduction = at::Reduction::Mean;
  int64_t ignore_index = -100;  // positions with this target do not count
  double label_smoothing = 0;
};

// Cross entropy of logits that are sharded over classes (Megatron: vocab_parallel_cross_entropy). It does not
// all-gather the logits. Ranks exchange only the maximum, the sum of exponentials and the logit of the target of each
// position. Differentiable once.
//
//   logits   (N, C, d1, ...) or (C), distributed
//   target   (N, d1, ...) of classes: distributed over the same mesh, or plain and the same on every rank
//   result   distributed. Positions that are sharded over other axes stay sharded with reduction None. With Sum and
//            Mean the result is partial over those axes. Mean is the mean over the global batch.
//
// Communication in forward, over each axis that shards classes: 3 all-reduces with one value per position (maximum;
// logit of the target; sums). Backward does not communicate. Mean adds an all-reduce of its denominator over the axes
// that shard positions. Shards may be uneven or empty. For plain logits this is LibTorch's cross entropy.
//
// Example:  auto logits = output(x);     // [S(2)] on tp, (batch, sequence, vocabulary)
//           auto loss = vocab_parallel_cross_entropy(logits.flatten(0, 1), targets.flatten());
at::Tensor vocab_parallel_cross_entropy(const at::Tensor& logits, const at::Tensor& target,
                                        const CrossEntropyOptions& options = {});

// nll_loss of log-probabilities that are sharded over classes: 1 all-reduce in forward. label_smoothing must be 0.
at::Tensor vocab_parallel_nll_loss(const at::Tensor& log_probs, const at::Tensor& target,
                                   const CrossEntropyOptions& options = {});

// Whether a mesh axis shards the class dim of these scores. False for plain tensors.
bool classes_are_sharded(const at::Tensor& scores);

}  // namespace tessera
