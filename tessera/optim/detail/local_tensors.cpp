#include "tessera/optim/detail/local_tensors.h"

#include <ATen/OpMathType.h>
#include <ATen/ops/scalar_tensor.h>

#include <utility>

namespace tessera::optim::detail {

Tensors local_tensors_of(const Tensors& tensors) {
  Tensors pieces;
  pieces.reserve(tensors.size());
  for (const auto& t : tensors) pieces.push_back(local_or_self(t));
  return pieces;
}

bool same_placement(const at::Tensor& a, const at::Tensor& b) {
  const auto* x = tessera::detail::spec_or_null(a);
  const auto* y = tessera::detail::spec_or_null(b);
  return x == y || (x && y && x->mesh == y->mesh && x->placements == y->placements);
}

at::Tensor redistribute_like(const at::Tensor& t, const at::Tensor& like) {
  return same_placement(t, like) ? t : DTensor(t).redistribute(DTensor(like).placements());
}

at::Tensor without_partial(const at::Tensor& t) {
  const auto* spec = tessera::detail::spec_or_null(t);
  if (!spec || !spec->has_partial()) return t;
  Placements whole = spec->placements;
  for (auto& p : whole)
    if (p.is_partial()) p = Replicate();
  return DTensor(t).redistribute(whole);
}

Tensors summed_gradients(const Tensors& parameters) {
  Tensors gradients;
  for (const auto& p : parameters) {
    auto& gradient = p.mutable_grad();
    if (!gradient.defined()) continue;
    auto summed = without_partial(gradient);
    if (!summed.is_same(gradient)) gradient = std::move(summed);
    gradients.push_back(gradient);
  }
  return gradients;
}

void mark_written(const at::Tensor& t, bool piece_too) {
  const auto bump = [](const at::Tensor& one) {
    if (!one.is_inference()) one.unsafeGetTensorImpl()->bump_version();
  };
  if (piece_too) bump(local_or_self(t));
  if (is_dtensor(t)) bump(t);
}

at::Tensor number_for(const Tensors& pieces, double number) {
  return at::scalar_tensor(number, at::toOpMathType(pieces[0].scalar_type()));
}

}  // namespace tessera::optim::detail
