#include "tessera/optim/detail/learning_rate.h"

#include "tessera/base/error.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/scalar_tensor.h>

#include <optional>

namespace tessera::optim {
namespace {

// The value after rounding to the dtype; none for dtypes that are rare as learning rates.
std::optional<double> rounded_to(at::ScalarType type, double number) {
  if (type == at::kDouble) return number;
  if (type == at::kFloat) return static_cast<float>(number);
  return std::nullopt;
}

}  // namespace

LearningRate::LearningRate(const at::Tensor& tensor) : tensor_(tensor) {
  TESSERA_CHECK(tensor.defined() && tensor.numel() == 1 && at::isFloatingType(tensor.scalar_type()), UsageError,
                "a learning rate is a number or a floating-point tensor of one element; found ",
                tensor.defined() ? c10::str(tensor.toString(), tensor.sizes()) : "an undefined tensor");
}

double LearningRate::number() const {
  if (!is_tensor()) return number_;
  if (tensor_.is_inference()) return tensor_.item<double>();  // inference tensors have no version
  if (version_ != tensor_._version()) {
    number_ = tensor_.item<double>();
    version_ = tensor_._version();
  }
  return number_;
}

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
  if (tensor_.is_inference() || !rounded_to(tensor_.scalar_type(), number)) return;
  number_ = *rounded_to(tensor_.scalar_type(), number);
  version_ = tensor_._version();
}

}  // namespace tessera::optim
