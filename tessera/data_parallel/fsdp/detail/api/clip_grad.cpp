#include "tessera/data_parallel/fsdp/detail/api/clip_grad.h"

#include "tessera/base/error.h"
#include "tessera/comm/detail/inplace_ops.h"
#include "tessera/comm/functional_collectives.h"
#include "tessera/data_parallel/fsdp/detail/engine/sharded_module.h"
#include "tessera/data_parallel/detail/local_gradient.h"
#include "tessera/data_parallel/detail/named_tensor.h"
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

using Groups = std::vector<comm::Group>;

// Gradients of which the same other ranks have other parts. There is one for every parameter, whether this rank has a
// gradient for it or not: all ranks must come to the same collectives.
struct Share {
  Groups cut_over;
  c10::Device device;  // that the groups talk on
  Tensors parts = {};  // this rank's
};

bool same_ranks(const Groups& a, const Groups& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](const auto& x, const auto& y) { return x->ranks() == y->ranks(); });
}

Share& share_for(std::vector<Share>& shares, const Groups& cut_over, c10::Device device) {
  for (auto& share : shares)
    if (same_ranks(share.cut_over, cut_over)) return share;
  return shares.emplace_back(Share{cut_over, device});
}

void add_cuts(const TensorSpec& spec, Groups& cut_over) {
  for (int64_t axis = 0; axis < spec.mesh.ndim(); axis++)
    if (spec.placements[static_cast<size_t>(axis)].is_sharded() && spec.mesh.size(axis) > 1)
      cut_over.push_back(spec.mesh.get_group(axis));
}

void add_unit(const Unit& unit, std::vector<Share>& shares) {
  const auto& shards = unit.shards();
  for (size_t i = 0; i < unit.members().size(); i++) {
    const auto& member = unit.members()[i];
    Groups cut_over;
    if (member.sharded) {  // over all axes
      add_cuts(*member.sharded, cut_over);
    } else {
      if (shards->size() > 1) cut_over.push_back(shards);
      if (member.outer) add_cuts(*member.outer, cut_over);
    }
    auto& share = share_for(shares, cut_over, unit.device());
    if (!unit.options().flat_parameter) {
      if (member.handle.grad().defined()) share.parts.push_back(local_value(member.handle.grad()));
    } else if (unit.flat().grad().defined()) {
      const auto place = unit.layout().in_shard(i, shards->rank());
      share.parts.push_back(unit.flat().grad().narrow(0, place.begin, place.size));
    }
  }
}

std::vector<Share> shares_of(const Module& module) {
  std::vector<Share> shares;
  std::unordered_set<const void*> seen;
  for (const auto& sharded : find_all(module)) {
    const auto& unit = *sharded->turn->unit;
    if (unit.members().empty()) continue;
    add_unit(unit, shares);
    seen.insert(unit.flat().unsafeGetTensorImpl());
    for (const auto& member : unit.members()) seen.insert(member.handle.unsafeGetTensorImpl());
  }
  for (const auto& [name, value] : parameters_of(module)) {
    if (seen.count(value.unsafeGetTensorImpl())) continue;
    Groups cut_over;
    if (is_dtensor(value)) add_cuts(DTensor(value).spec(), cut_over);
    auto& share = share_for(shares, cut_over, local_value(value).device());
    if (value.grad().defined()) share.parts.push_back(local_gradient(value, name));
  }
  return shares;
}

// Of one share, over all its ranks, in a form that can be added (or, for infinity, compared): the norm to the power p.
at::Tensor power_of_norm(const Share& share, double p) {
  const bool infinite = std::isinf(p);
  auto total = at::zeros({}, at::TensorOptions(share.device).dtype(at::kFloat));
  for (const auto& part : share.parts) {
    if (part.numel() == 0) continue;
    const auto wide = part.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
    const auto norm = at::linalg_vector_norm(part, p, std::nullopt, false, wide).to(share.device);
    total = infinite ? at::maximum(total, norm) : total + at::pow(norm, p);
  }
  total = total.to(at::kDouble);
  for (const auto& group : share.cut_over) {
    comm::all_reduce_(total, infinite ? ReduceOp::Max : ReduceOp::Sum, group);
    funcol::wait(total, group);
  }
  return total;
}

}  // namespace

at::Tensor clip_grad_norm_(const Module& module, double max_norm, double norm_type) {
  TESSERA_CHECK(norm_type > 0, UsageError, "a norm of type ", norm_type,
                " was asked for; it must be above 0, or infinity");
  TESSERA_CHECK(max_norm >= 0, UsageError, "gradients cannot be scaled to a norm of ", max_norm);
  const at::NoGradGuard no_grad;
  const auto shares = shares_of(module);
  const bool infinite = std::isinf(norm_type);
  auto total = at::zeros({}, at::kDouble);
  for (const auto& share : shares) {
    const auto own = power_of_norm(share, norm_type);
    total = total.to(own.device());
    total = infinite ? at::maximum(total, own) : total + own;
  }
  if (!infinite) total = at::pow(total, 1 / norm_type);
  const auto factor = at::clamp(max_norm / (total + 1e-6), std::nullopt, 1.0);
  for (const auto& share : shares)
    for (const auto& part : share.parts) part.mul_(factor.to(part.device()));
  return total.to(at::kFloat);
}

}  // namespace tessera::data_parallel::fsdp
