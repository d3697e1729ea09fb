#pragma once
#include <ATen/core/Tensor.h>

namespace tessera::optim {

// A learning rate: a number, or a tensor of one element. A compiled step reads it in each run. Copies of a tensor
// learning rate share the tensor.
//
// Example:  optim::AdamW opt(model->parameters(), {.lr = 3e-4});
//           optim::AdamW opt(model->parameters(), {.lr = torch::tensor(3e-4)});
class LearningRate {
 public:
  LearningRate(double number) : number_(number) {}  // NOLINT(google-explicit-constructor)
  // Throws UsageError unless it has one element of a floating dtype.
  LearningRate(const at::Tensor& tensor);  // NOLINT(google-explicit-constructor)

  // Whether it is a tensor.
  bool is_tensor() const { return tensor_.defined(); }
  // The value. For a tensor: the cached value of the last set(). Copies it to the host only if the tensor's version
  // shows another write, so a scheduler causes no copy.
  double number() const;
  // The value as a tensor without dims. For a number: a new double tensor on the CPU.
  at::Tensor tensor() const;
  // The tensor that was given. Throws UsageError if it is a number.
  at::Tensor tensor_itself() const;
  // Changes the value. Writes into the tensor if it is one.
  void set(double number);

 private:
  mutable double number_ = 0;     // for a tensor: its value at `version_`
  mutable int64_t version_ = -1;  // -1: unknown
  at::Tensor tensor_;
};

}  // namespace tessera::optim
