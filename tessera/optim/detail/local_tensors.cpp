#include "tessera/optim/detail/local_tensors.h"

#include <ATen/OpMathType.h>
#include <ATen/ops/scalar_tensor.h>

#include <utility>

namespace tessera::optim::detail {

Tensors local_tensors_of(const Tensors& tensors) {
  Tensors locals;
  locals.reserve(tensors.size());
  for (const auto& t : tensors) locals.push_back(t.defined() ? local_or_self(t) : t);
  return locals;
}

bool same_placement(const at::Tensor& a, const at::Tensor& b) {
  const auto* x = tessera::detail::spec_or_null(a);
  const auto* y = tessera::detail::spec_or_null(b);
  return x == y || (x && y && x->mesh == y->mesh && x->placements == y->placements);
}

at::Tensor redistribute_like(const at::Tensor& t, const at::Tensor& like) {
  return same_placement(t, like) ? t : DTensor(t).redistribute(DTensor(like).placements());
}

at::Tensor reduce_partial(const at::Tensor& t) {
  const auto* spec = tessera::detail::spec_or_null(t);
  if (!spec || !spec->has_partial()) return t;
  Placements reduced = spec->placements;
  for (auto& p : reduced)
    if (p.is_partial()) p = Replicate();
  return DTensor(t).redistribute(reduced);
}

Tensors reduce_partial_gradients(const Tensors& parameters) {
  Tensors gradients;
  for (const auto& p : parameters) {
    auto& gradient = p.mutable_grad();
    if (!gradient.defined()) continue;
    auto reduced = reduce_partial(gradient);
    if (!reduced.is_same(gradient)) gradient = std::move(reduced);
    gradients.push_back(gradient);
  }
  return gradients;
}

void mark_written(const at::Tensor& t, bool local_too) {
  const auto bump = [](const at::Tensor& one) {
    if (!one.is_inference()) one.unsafeGetTensorImpl()->bump_version();
  };
  if (local_too) bump(local_or_self(t));
  if (is_dtensor(t)) bump(t);
}

at::Tensor op_math_scalar(const Tensors& locals, double number) {
  const auto dtype = at::toOpMathType(locals[0].scalar_type());
  if (locals[0].is_cpu()) return at::scalar_tensor(number, dtype);
  return at::scalar_tensor(number, at::TensorOptions(locals[0].device()).dtype(dtype));  // some foreach ops ask for it
}

std::vector<Tensors> lists_by_device_and_dtype(const Tensors& tensors) {
  std::vector<Tensors> lists;
  for (const auto& indices : by_device_and_dtype(tensors)) {
    auto& list = lists.emplace_back();
    for (const size_t i : indices) list.push_back(tensors[i]);
  }
  return lists;
}

}  // namespace tessera::optim::detail
