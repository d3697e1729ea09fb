#pragma once
#include <ATen/core/Tensor.h>

namespace tessera::optim {

// A learning rate: a number, or a tensor of one element. A compiled step reads either anew each time it runs. Copies of
// one that is a tensor share it.
//
// Example:  optim::AdamW opt(model->parameters(), {.lr = 3e-4});
//           optim::AdamW opt(model->parameters(), {.lr = torch::tensor(3e-4)});
class LearningRate {
 public:
  LearningRate(double number) : number_(number) {}  // NOLINT(google-explicit-constructor)
  // UsageError unless it has one element, of a floating dtype.
  LearningRate(const at::Tensor& tensor);  // NOLINT(google-explicit-constructor)

  bool is_tensor() const { return tensor_.defined(); }
  // Of a tensor: what was last written to it here, and read, which on a device is waited for, only if somebody else has
  // written since. So a scheduler reads nothing.
  double number() const;
  at::Tensor tensor() const;         // without dims; of a number: a new one, double, on the CPU
  at::Tensor tensor_itself() const;  // UsageError if it is a number
  void set(double number);           // of a tensor: writes into it

 private:
  mutable double number_ = 0;     // of a tensor: what it held at `version_`
  mutable int64_t version_ = -1;  // -1: not known
  at::Tensor tensor_;
};

}  // namespace tessera::optim
