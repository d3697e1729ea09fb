#include "tessera/optim/learning_rate.h"

#include "tessera/base/error.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/scalar_tensor.h>

namespace tessera::optim {

LearningRate::LearningRate(const at::Tensor& tensor) : tensor_(tensor) {
  TESSERA_CHECK(tensor.defined() && tensor.numel() == 1 && at::isFloatingType(tensor.scalar_type()), UsageError,
                "a learning rate is a number or a floating tensor of one element; found ",
                tensor.defined() ? c10::str(tensor.toString(), tensor.sizes()) : "an undefined tensor");
}

double LearningRate::number() const { return is_tensor() ? tensor_.item<double>() : number_; }

at::Tensor LearningRate::tensor() const {
  return is_tensor() ? tensor_.detach().view(c10::IntArrayRef()) : at::scalar_tensor(number_, at::kDouble);
}

at::Tensor LearningRate::tensor_itself() const {
  TESSERA_CHECK(is_tensor(), UsageError, "this learning rate is the number ", number_, ", not a tensor");
  return tensor_;
}

void LearningRate::set(double number) {
  if (!is_tensor()) {
    number_ = number;
    return;
  }
  const at::NoGradGuard no_grad;
  tensor_.fill_(number);
}

}  // namespace tessera::optim
