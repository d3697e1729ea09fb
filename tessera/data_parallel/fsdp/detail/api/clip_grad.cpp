#include "tessera/data_parallel/fsdp/detail/api/clip_grad.h"

#include "tessera/base/error.h"
#include "tessera/comm/detail/inplace_ops.h"
#include "tessera/comm/functional_collectives.h"
#include "tessera/data_parallel/detail/local_gradient.h"
#include "tessera/data_parallel/detail/named_tensor.h"
#include "tessera/data_parallel/fsdp/detail/engine/sharded_module.h"
#include "tessera/dtensor/dtensor.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/clamp.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/pow.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>
#include <unordered_set>

namespace tessera::data_parallel::fsdp {
namespace {

using CommGroups = std::vector<comm::Group>;

// Gradients that are sharded over the same groups. Every parameter has one, even if this rank has no gradient for it:
// all ranks must call the same collectives.
struct GradientsByGroups {
  CommGroups sharded_over;
  c10::Device device;        // of the collectives
  Tensors local_grads = {};  // this rank's
};

bool same_ranks(const CommGroups& a, const CommGroups& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](const auto& x, const auto& y) { return x->ranks() == y->ranks(); });
}

GradientsByGroups& entry_for(std::vector<GradientsByGroups>& entries, const CommGroups& sharded_over,
                             c10::Device device) {
  for (auto& entry : entries)
    if (same_ranks(entry.sharded_over, sharded_over)) return entry;
  return entries.emplace_back(GradientsByGroups{sharded_over, device});
}

void add_sharding_groups(const TensorSpec& spec, CommGroups& sharded_over) {
  for (int64_t axis = 0; axis < spec.mesh.ndim(); axis++)
    if (spec.placements[static_cast<size_t>(axis)].is_sharded() && spec.mesh.size(axis) > 1)
      sharded_over.push_back(spec.mesh.get_group(axis));
}

void add_param_group(const ParamGroup& group, std::vector<GradientsByGroups>& entries) {
  TESSERA_CHECK(!group.gradients().shows_unreduced(), UsageError, "clip_grad_norm_: the gradients of parameter group ",
                group.name(), " are not reduced yet (backward without synchronization); run a backward with it first");
  const auto& shard_group = group.shard_group();
  for (size_t i = 0; i < group.params().size(); i++) {
    const auto& param = group.params()[i];
    CommGroups sharded_over;
    if (param.sharded_spec) {  // has all mesh axes
      add_sharding_groups(*param.sharded_spec, sharded_over);
    } else {
      if (shard_group->size() > 1) sharded_over.push_back(shard_group);
      if (param.unsharded_spec) add_sharding_groups(*param.unsharded_spec, sharded_over);
    }
    auto& entry = entry_for(entries, sharded_over, group.device());
    if (!group.options().flat_parameter) {
      if (param.tensor.grad().defined()) entry.local_grads.push_back(local_or_self(param.tensor.grad()));
    } else if (group.flat_param().grad().defined()) {
      const auto range = group.layout().range_in_shard(i, shard_group->rank());
      entry.local_grads.push_back(group.flat_param().grad().narrow(0, range.begin, range.size));
    }
  }
}

std::vector<GradientsByGroups> gradients_of_module(const Module& module) {
  std::vector<GradientsByGroups> entries;
  std::unordered_set<const void*> seen;
  for (const auto& sharded : find_sharded_modules(module)) {
    const auto& group = sharded->group();
    if (group.params().empty()) continue;
    add_param_group(group, entries);
    seen.insert(group.flat_param().unsafeGetTensorImpl());
    for (const auto& param : group.params()) seen.insert(param.tensor.unsafeGetTensorImpl());
  }
  for (const auto& [name, value] : parameters_of(module)) {
    if (seen.count(value.unsafeGetTensorImpl())) continue;
    CommGroups sharded_over;
    if (is_dtensor(value)) add_sharding_groups(DTensor(value).spec(), sharded_over);
    auto& entry = entry_for(entries, sharded_over, local_or_self(value).device());
    if (value.grad().defined()) entry.local_grads.push_back(local_gradient(value, name));
  }
  return entries;
}

// The norm over all ranks, to the power p, so that entries can be added. For infinity: the norm itself.
at::Tensor power_of_norm(const GradientsByGroups& entry, double p) {
  const bool infinite = std::isinf(p);
  auto total = at::zeros({}, at::TensorOptions(entry.device).dtype(at::kFloat));
  for (const auto& gradient : entry.local_grads) {
    if (gradient.numel() == 0) continue;
    const auto norm_dtype = gradient.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
    const auto norm = at::linalg_vector_norm(gradient, p, std::nullopt, false, norm_dtype).to(entry.device);
    total = infinite ? at::maximum(total, norm) : total + at::pow(norm, p);
  }
  total = total.to(at::kDouble);
  for (const auto& group : entry.sharded_over) {
    comm::all_reduce_(total, infinite ? ReduceOp::Max : ReduceOp::Sum, group);
    funcol::wait(total, group);
  }
  return total;
}

}  // namespace

at::Tensor clip_grad_norm_(const Module& module, double max_norm, double norm_type) {
  TESSERA_CHECK(norm_type > 0, UsageError, "clip_grad_norm_: norm_type is ", norm_type,
                "; it must be above 0, or infinity");
  TESSERA_CHECK(max_norm >= 0, UsageError, "clip_grad_norm_: max_norm is ", max_norm, "; it must not be negative");
  const at::NoGradGuard no_grad;
  const auto entries = gradients_of_module(module);
  const bool infinite = std::isinf(norm_type);
  auto total = at::zeros({}, at::kDouble);
  for (const auto& entry : entries) {
    const auto own = power_of_norm(entry, norm_type);
    total = total.to(own.device());
    total = infinite ? at::maximum(total, own) : total + own;
  }
  if (!infinite) total = at::pow(total, 1 / norm_type);
  const auto factor = at::clamp(max_norm / (total + 1e-6), std::nullopt, 1.0);
  for (const auto& entry : entries)
    for (const auto& gradient : entry.local_grads) gradient.mul_(factor.to(gradient.device()));
  return total.to(at::kFloat);
}

}  // namespace tessera::data_parallel::fsdp
