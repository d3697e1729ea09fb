#pragma once
#include "tessera/compile/detail/api/guard_snapshot.h"
#include "tessera/placement/detail/tensor_spec.h"

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <memory>
#include <string>

namespace tessera::compiler {

// The properties of a tensor that a program is specialized for: dtype, device, sizes, strides, layout, requires_grad,
// conj and neg bits, placements, hooks on its gradient and on the accumulator of its gradient, the dtype of the
// gradient, whether it is a view. Not its memory: programs rebind that on every run.
class TensorGuard {
 public:
  TensorGuard() = default;  // of an undefined tensor
  explicit TensorGuard(const at::Tensor& t);
  bool holds(const at::Tensor& t) const;
  // Adds the memory that holds(t) reads. False if that is not known: of DTensors, views, tensors with hooks.
  bool add_to(GuardSnapshot& snapshot, const at::Tensor& t) const;
  // "f32[3, 4], which requires a gradient": the properties of `t`, for messages.
  static std::string describe(const at::Tensor& t);
  // The description of the tensor of this guard.
  std::string text() const { return rest_ ? rest_->text : "undefined"; }
  // What differs, as "f64[3], it was f32[3]"; "" if the guard holds.
  std::string difference(const at::Tensor& t) const;
  // Is the tensor a wrapped number, zeros without memory, or has it a tangent of forward-mode AD? A program cannot have
  // such inputs.
  bool cannot_be_input() const { return wrapped_number_ || zero_tensor_ || autograd_.has_tangent; }

  struct Autograd {
    size_t hooks = 0;  // 0: none
    bool has_tangent = false, retains_grad = false, is_view = false;
    c10::ScalarType grad_dtype = c10::ScalarType::Undefined;
    bool operator==(const Autograd&) const = default;
  };

 private:
  using Layout = c10::SmallVector<int64_t, 4>;  // sizes and strides
  static Layout layout_of(const at::Tensor& t);
  static bool same_layout(const c10::TensorImpl& impl, const Layout& layout);
  // Small, because a check reads the guards of all parameters: what only messages and DTensors need is elsewhere.
  struct Rest {
    SpecRef spec;         // of a DTensor
    Layout local_layout;  // sizes and strides of the local tensor of a DTensor
    std::string text;
  };
  uint64_t keys_ = 0;  // of the dispatcher: device, layout, conj, neg, inference, distributed
  caffe2::TypeMeta dtype_;
  c10::Device device_ = c10::kCPU;
  bool requires_grad_ = false, wrapped_number_ = false, zero_tensor_ = false, distributed_ = false;
  Autograd autograd_;
  Layout sizes_and_strides_;
  std::shared_ptr<const Rest> rest_;
};

}  // namespace tessera::compiler
