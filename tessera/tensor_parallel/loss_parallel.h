#pragma once
#include "tessera/tensor_parallel/detail/vocab_parallel_cross_entropy.h"

namespace tessera {

// PyTorch's loss_parallel(). In this scope and thread, the losses torch::nn::functional::cross_entropy, nll_loss and
// torch::nn::CrossEntropyLoss of distributed logits that are sharded over classes call vocab_parallel_cross_entropy.
// They do not all-gather the classes. The scope does not affect plain tensors, unsharded classes, targets that are
// probabilities, and log_softmax without nll_loss. backward() may run later and on any thread.
//
// Example:  LossParallel scope;
//           auto loss = torch::nn::functional::cross_entropy(logits, target);      // logits: [S(1)] on tp
//           loss.backward();
class LossParallel {
 public:
  [[nodiscard]] LossParallel();
  ~LossParallel();
  LossParallel(const LossParallel&) = delete;
  LossParallel& operator=(const LossParallel&) = delete;
};

}  // namespace tessera
