#pragma once
#include <ATen/core/Tensor.h>

namespace tessera::optim {

// A learning rate: a number, or a tensor of one element that a compiled step reads anew each time it runs. A number is
// part of what is compiled. Copies of one that is a tensor share it.
//
// Example:  optim::AdamW opt(model->parameters(), {.lr = 3e-4});
//           optim::AdamW opt(model->parameters(), {.lr = torch::tensor(3e-4)});
class LearningRate {
 public:
  LearningRate(double number) : number_(number) {}  // NOLINT(google-explicit-constructor)
  // UsageError unless it has one element, of a floating dtype.
  LearningRate(const at::Tensor& tensor);  // NOLINT(google-explicit-constructor)

  bool is_tensor() const { return tensor_.defined(); }
  double number() const;             // reads a tensor: on a device, waits for it
  at::Tensor tensor() const;         // without dims; of a number: a new one, double, on the CPU
  at::Tensor tensor_itself() const;  // UsageError if it is a number
  void set(double number);           // of a tensor: writes into it

 private:
  double number_ = 0;
  at::Tensor tensor_;
};

}  // namespace tessera::optim
