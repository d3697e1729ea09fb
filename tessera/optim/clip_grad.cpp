#include "tessera/optim/clip_grad.h"

#include "tessera/base/error.h"
#include "tessera/placement/detail/tensor_spec.h"
#include "tessera/tracing/detail/invariant_scope.h"

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

// Tensors that are sharded over the same axes of one mesh: their local norms are reduced over these axes together.
// Plain and replicated tensors need no reduction.
struct NormGroup {
  DeviceMesh mesh;  // null: no reduction
  std::vector<int64_t> axes;
  Tensors tensors;
};

std::vector<NormGroup> by_sharded_axes(const Tensors& tensors) {
  std::vector<NormGroup> groups;
  for (const auto& t : tensors) {
    DeviceMesh mesh;
    std::vector<int64_t> axes;
    if (is_dtensor(t)) {
      const auto& spec = DTensor(t).spec();
      for (int64_t axis = 0; axis < spec.mesh.ndim(); axis++)
        if (spec.placements[static_cast<size_t>(axis)].is_sharded() && spec.mesh.size(axis) > 1) axes.push_back(axis);
      if (!axes.empty()) mesh = spec.mesh;
    }
    auto found = std::find_if(groups.begin(), groups.end(), [&](const NormGroup& s) {
      return static_cast<bool>(s.mesh) == static_cast<bool>(mesh) && s.axes == axes && (!mesh || s.mesh == mesh);
    });
    if (found == groups.end()) found = groups.insert(groups.end(), NormGroup{mesh, axes, {}});
    found->tensors.push_back(t);
  }
  return groups;
}

Tensors local_norms(const Tensors& tensors, const NormOptions& options) {
  Tensors locals;
  for (const auto& t : tensors)  // an empty local tensor has no maximum, and adds nothing to other norms
    if (detail::local_or_self(t).numel() > 0) locals.push_back(detail::local_or_self(t));
  Tensors norms;
  for (const auto& list : detail::lists_by_device_and_dtype(locals)) {
    if (options.foreach) {
      for (auto& norm : at::_foreach_norm(list, options.norm_type)) norms.push_back(std::move(norm));
    } else {
      for (const auto& local : list) norms.push_back(at::linalg_vector_norm(local, options.norm_type));
    }
  }
  return norms;
}

at::Tensor norm_of_norms(Tensors norms, double norm_type) {
  for (auto& norm : norms) norm = norm.to(norms[0].device());
  return at::linalg_vector_norm(at::stack(norms), norm_type);
}

// The norm of the local tensors of a group, reduced over the sharded axes. bfloat16 and half norms are sent as float,
// because their squares may overflow.
at::Tensor norm_over_ranks(const NormGroup& group, const Tensors& norms, double norm_type) {
  const auto& local = detail::local_or_self(group.tensors[0]);
  const auto dtype = c10::toRealValueType(local.scalar_type());
  const auto wide = dtype == at::kHalf || dtype == at::kBFloat16 ? at::kFloat : dtype;
  const auto own =
      norms.empty() ? at::zeros({}, local.options().dtype(wide)) : norm_of_norms(norms, norm_type).to(wide);
  Placements partial(static_cast<size_t>(group.mesh.ndim()), Replicate());
  const Placements replicated = partial;
  for (const int64_t axis : group.axes) partial[static_cast<size_t>(axis)] = NormPartial(norm_type);
  const auto spec = intern(group.mesh, partial, {}, {}, wide, own.device());
  return detail::local_or_self(DTensor(tessera::detail::wrap(own, spec)).redistribute(replicated)).to(dtype);
}

// Calls f(list) for the local gradients of each device and dtype, with foreach = false for each gradient alone.
template <class F>
void for_each_local_list(const Tensors& gradients, bool foreach, F f) {
  for (const auto& list : detail::lists_by_device_and_dtype(detail::local_tensors_of(gradients))) {
    if (foreach) {
      f(list);
    } else {
      for (const auto& local : list) f(Tensors{local});
    }
  }
  for (const auto& gradient : gradients) detail::mark_written(gradient);
}

void check_norm_type(double p) {
  TESSERA_CHECK(p > 0, UsageError, "norm_type is ", p, "; it must be greater than 0, or infinity");
}

}  // namespace

at::Tensor get_total_norm(const Tensors& tensors, const NormOptions& options) {
  check_norm_type(options.norm_type);
  const at::NoGradGuard no_grad;
  Tensors reduced;
  for (const auto& t : tensors) reduced.push_back(detail::reduce_partial(t));

  Tensors norms;
  if (invariant_scope_is_open()) {  // the norms of the global tensors, in the order of the list
    for (const auto& t : reduced) norms.push_back(detail::local_or_self(at::linalg_vector_norm(t, options.norm_type)));
    reduced.clear();
  }
  for (const auto& group : by_sharded_axes(reduced)) {
    const auto own = local_norms(group.tensors, options);
    if (group.mesh)
      norms.push_back(norm_over_ranks(group, own, options.norm_type));
    else
      norms.insert(norms.end(), own.begin(), own.end());
  }
  const auto total = norms.empty() ? at::zeros({}) : norm_of_norms(norms, options.norm_type);
  if (options.error_if_nonfinite)
    TESSERA_CHECK(at::isfinite(total).item<bool>(), UsageError, "the norm of type ", options.norm_type, " of ",
                  tensors.size(), " tensors is ", total.item<double>(),
                  "; no gradient was scaled. Pass error_if_nonfinite = false to scale in spite of this");
  return total;
}

void clip_grads_with_norm_(const Tensors& parameters, double max_norm, const at::Tensor& total_norm, bool foreach) {
  TESSERA_CHECK(max_norm >= 0, UsageError, "max_norm is ", max_norm, "; it must be at least 0");
  const at::NoGradGuard no_grad;
  const auto factor = at::clamp(max_norm / (total_norm + 1e-6), std::nullopt, 1.0);
  for_each_local_list(detail::reduce_partial_gradients(parameters), foreach,
                      [&](const Tensors& list) { at::_foreach_mul_(list, factor.to(list[0].device())); });
}

at::Tensor clip_grad_norm_(const Tensors& parameters, double max_norm, const NormOptions& options) {
  check_norm_type(options.norm_type);
  TESSERA_CHECK(max_norm >= 0, UsageError, "max_norm is ", max_norm, "; it must be at least 0");
  const at::NoGradGuard no_grad;
  const auto total = get_total_norm(detail::reduce_partial_gradients(parameters), options);
  clip_grads_with_norm_(parameters, max_norm, total, options.foreach);
  return total;
}

void clip_grad_value_(const Tensors& parameters, double clip_value, bool foreach) {
  TESSERA_CHECK(clip_value >= 0, UsageError, "clip_value is ", clip_value, "; it must be at least 0");
  const at::NoGradGuard no_grad;
  for_each_local_list(detail::reduce_partial_gradients(parameters), foreach, [&](const Tensors& list) {
    at::_foreach_clamp_min_(list, -clip_value);
    at::_foreach_clamp_max_(list, clip_value);
  });
}

}  // namespace tessera::optim
