#pragma once

namespace tessera {

// While alive, on this thread, torch::nn::functional::cross_entropy, torch::nn::CrossEntropyLoss and nll_loss of
// distributed scores whose classes are cut go to vocab_parallel_cross_entropy instead of gathering the classes. All
// else is as it was: plain tensors, whole classes, targets that are probabilities, and a log_softmax that stands alone.
// The backward may run later, and on any thread.
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
