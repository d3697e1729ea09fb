#pragma once
#include <ATen/core/Tensor.h>

// Cross entropy of logits in any floating dtype, computed in float, that reads the logits once forward and once
// backward. LibTorch's chain on bfloat16 (convert, log_softmax, nll_loss, and back) makes four float copies of them.
namespace tessera::cuda {

// Is there a kernel for these logits? Otherwise LibTorch's chain serves.
bool has_cross_entropy(const at::Tensor& logits);

// The loss of each row. logits (N, classes), targets (N) of classes; a row with target `ignore_index` has loss 0.
// Differentiable in the logits. `reuse_logits`: nobody reads the logits afterwards, so a backward that does not keep
// its graph writes their gradient into their memory.
at::Tensor cross_entropy_rows(const at::Tensor& logits, const at::Tensor& targets, int64_t ignore_index = -100,
                              bool reuse_logits = false);

}  // namespace tessera::cuda
