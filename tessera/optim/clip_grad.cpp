#include "tessera/optim/clip_grad.h"

#include "tessera/base/error.h"
#include "tessera/placement/detail/tensor_spec.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_clamp_max.h>
#include <ATen/ops/_foreach_clamp_min.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/clamp.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>

namespace tessera::optim {
namespace {

// Tensors whose norm is missing the same ranks' share: one mesh, cut over the same of its axes. Plain and replicated
// ones are missing nothing.
struct Share {
  DeviceMesh mesh;  // none: missing nothing
  std::vector<int64_t> axes;
  Tensors tensors;
};

std::vector<Share> by_missing_ranks(const Tensors& tensors) {
  std::vector<Share> shares;
  for (const auto& t : tensors) {
    DeviceMesh mesh;
    std::vector<int64_t> axes;
    if (is_dtensor(t)) {
      const auto& spec = DTensor(t).spec();
      for (int64_t axis = 0; axis < spec.mesh.ndim(); axis++)
        if (spec.placements[static_cast<size_t>(axis)].is_sharded()) axes.push_back(axis);
      if (!axes.empty()) mesh = spec.mesh;
    }
    auto found = std::find_if(shares.begin(), shares.end(), [&](const Share& s) {
      return static_cast<bool>(s.mesh) == static_cast<bool>(mesh) && s.axes == axes && (!mesh || s.mesh == mesh);
    });
    if (found == shares.end()) found = shares.insert(shares.end(), Share{mesh, axes, {}});
    found->tensors.push_back(t);
  }
  return shares;
}

Tensors norms_of_pieces(const Tensors& tensors, const NormOptions& options) {
  Tensors pieces;
  for (const auto& t : tensors)  // an empty piece has no largest element, and adds nothing to other norms
    if (detail::local_or_self(t).numel() > 0) pieces.push_back(detail::local_or_self(t));
  Tensors norms;
  for (const auto& indices : detail::by_device_and_dtype(pieces)) {
    Tensors alike;
    for (const size_t i : indices) alike.push_back(pieces[i]);
    if (options.foreach) {
      for (auto& norm : at::_foreach_norm(alike, options.norm_type)) norms.push_back(std::move(norm));
    } else {
      for (const auto& piece : alike) norms.push_back(at::linalg_vector_norm(piece, options.norm_type));
    }
  }
  return norms;
}

at::Tensor norm_of_norms(Tensors norms, double norm_type) {
  for (auto& norm : norms) norm = norm.to(norms[0].device());
  return at::linalg_vector_norm(at::stack(norms), norm_type);
}

// The norm of a share's pieces on this rank, and then with the other ranks'. bfloat16 and half travel as floats: their
// squares would not.
at::Tensor norm_over_ranks(const Share& share, const Tensors& norms, double norm_type) {
  const auto& piece = detail::local_or_self(share.tensors[0]);
  const auto dtype = c10::toRealValueType(piece.scalar_type());
  const auto wide = dtype == at::kHalf || dtype == at::kBFloat16 ? at::kFloat : dtype;
  const auto own =
      norms.empty() ? at::zeros({}, piece.options().dtype(wide)) : norm_of_norms(norms, norm_type).to(wide);
  Placements terms(static_cast<size_t>(share.mesh.ndim()), Replicate());
  const Placements whole = terms;
  for (const int64_t axis : share.axes) terms[static_cast<size_t>(axis)] = NormPartial(norm_type);
  const auto spec = intern(share.mesh, terms, {}, {}, wide, own.device());
  return detail::local_or_self(DTensor(tessera::detail::wrap(own, spec)).redistribute(whole)).to(dtype);
}

// f(pieces of one device and dtype), with all or with each.
template <class F>
void for_pieces(const Tensors& gradients, bool foreach, F f) {
  const auto pieces = detail::local_tensors_of(gradients);
  for (const auto& indices : detail::by_device_and_dtype(pieces)) {
    Tensors alike;
    for (const size_t i : indices) alike.push_back(pieces[i]);
    if (foreach) {
      f(alike);
    } else {
      for (const auto& piece : alike) f(Tensors{piece});
    }
  }
  for (const auto& gradient : gradients) detail::mark_written(gradient);
}

void check_norm_type(double p) {
  TESSERA_CHECK(p > 0, UsageError, "a norm of type ", p, " was asked for; it must be above 0, or infinity");
}

}  // namespace

at::Tensor get_total_norm(const Tensors& tensors, const NormOptions& options) {
  check_norm_type(options.norm_type);
  const at::NoGradGuard no_grad;
  Tensors whole;
  for (const auto& t : tensors) whole.push_back(detail::without_partial(t));

  Tensors norms;
  for (const auto& share : by_missing_ranks(whole)) {
    const auto own = norms_of_pieces(share.tensors, options);
    if (share.mesh)
      norms.push_back(norm_over_ranks(share, own, options.norm_type));
    else
      norms.insert(norms.end(), own.begin(), own.end());
  }
  const auto total = norms.empty() ? at::zeros({}) : norm_of_norms(norms, options.norm_type);
  if (options.error_if_nonfinite)
    TESSERA_CHECK(at::isfinite(total).item<bool>(), UsageError, "the norm of type ", options.norm_type, " of ",
                  tensors.size(), " tensors is ", total.item<double>(),
                  "; nothing was scaled. With error_if_nonfinite = false the gradients are scaled by it all the same");
  return total;
}

void clip_grads_with_norm_(const Tensors& parameters, double max_norm, const at::Tensor& total_norm, bool foreach) {
  TESSERA_CHECK(max_norm >= 0, UsageError, "gradients cannot be scaled to a norm of ", max_norm);
  const at::NoGradGuard no_grad;
  const auto factor = at::clamp(max_norm / (total_norm + 1e-6), std::nullopt, 1.0);
  for_pieces(detail::summed_gradients(parameters), foreach,
             [&](const Tensors& pieces) { at::_foreach_mul_(pieces, factor.to(pieces[0].device())); });
}

at::Tensor clip_grad_norm_(const Tensors& parameters, double max_norm, const NormOptions& options) {
  check_norm_type(options.norm_type);
  TESSERA_CHECK(max_norm >= 0, UsageError, "gradients cannot be scaled to a norm of ", max_norm);
  const at::NoGradGuard no_grad;
  const auto total = get_total_norm(detail::summed_gradients(parameters), options);
  clip_grads_with_norm_(parameters, max_norm, total, options.foreach);
  return total;
}

void clip_grad_value_(const Tensors& parameters, double clip_value, bool foreach) {
  TESSERA_CHECK(clip_value >= 0, UsageError, "gradients cannot be clipped to values within ", clip_value, " of 0");
  const at::NoGradGuard no_grad;
  for_pieces(detail::summed_gradients(parameters), foreach, [&](const Tensors& pieces) {
    at::_foreach_clamp_min_(pieces, -clip_value);
    at::_foreach_clamp_max_(pieces, clip_value);
  });
}

}  // namespace tessera::optim
