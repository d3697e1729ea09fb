#include "tessera/numerics/detail/mesh_sum.h"

#include "tessera/base/error.h"
#include "tessera/comm/functional_collectives.h"
#include "tessera/dtensor/detail/arguments.h"
#include "tessera/dtensor/detail/dispatch.h"
#include "tessera/dtensor/detail/redistribute_inputs.h"
#include "tessera/numerics/detail/shard_batch.h"
#include "tessera/tracing/detail/invariant_scope.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/tensor.h>

#include <algorithm>
#include <numeric>
#include <optional>

namespace tessera::numerics {
namespace {

using propagate::Decision;

IndexRange range_or_empty(const IndexRanges& ranges) { return ranges.empty() ? IndexRange{0, 0} : ranges[0]; }

// The ranks that have different terms, in the order of their group, and the complete subtrees of each.
struct SubtreeOwners {
  comm::Group group;
  std::vector<std::vector<IndexRange>> subtrees;
};

std::vector<int64_t> coordinate_of(const detail::MeshState& mesh, int64_t rank) {
  std::vector<int64_t> coordinate(mesh.shape.size());
  int64_t rest = std::find(mesh.ranks.begin(), mesh.ranks.end(), rank) - mesh.ranks.begin();
  for (size_t a = mesh.shape.size(); a-- > 0; rest /= mesh.shape[a]) coordinate[a] = rest % mesh.shape[a];
  return coordinate;
}

// None if a rank of the group has a shard that is not a range of complete leaves: a strided shard, or a number of ranks
// that is not in kRankCounts. Depends on the spec alone, so all ranks find the same.
std::optional<SubtreeOwners> find_owners(detail::MeshState& mesh, const std::vector<int64_t>& axes,
                                         const TensorSpec& summed, int64_t dim) {
  SubtreeOwners owners{mesh.joint_group(axes), {}};
  const auto terms = summed.sizes[static_cast<size_t>(dim)];
  const auto bounds = leaf_bounds(terms);
  for (const auto rank : owners.group->ranks()) {
    const auto ranges = local_ranges(summed.placements, mesh.shape, coordinate_of(mesh, rank), dim, terms);
    const auto range = range_or_empty(ranges);
    if (ranges.size() > 1) return std::nullopt;
    for (const auto end : {range.begin, range.end})
      if (!std::binary_search(bounds.begin(), bounds.end(), end)) return std::nullopt;
    owners.subtrees.push_back(complete_subtrees(terms, range));
  }
  return owners;
}

// The spec of an input of which every rank of the axes has all terms.
SpecRef gathered_over(const TensorSpec& spec, const std::vector<int64_t>& axes) {
  Placements placements(spec.placements.begin(), spec.placements.end());
  for (const auto axis : axes) placements[static_cast<size_t>(axis)] = Replicate();
  return with_placements(spec, placements);
}

// Gathers the subtrees of all owners and adds them.
at::Tensor gather_and_add(const at::Tensor& mine, int64_t terms, const SubtreeOwners& owners) {
  std::vector<int64_t> counts;
  std::vector<IndexRange> ranges;
  for (const auto& subtrees : owners.subtrees) {
    counts.push_back(static_cast<int64_t>(subtrees.size()));
    ranges.insert(ranges.end(), subtrees.begin(), subtrees.end());
  }
  if (counts == std::vector<int64_t>{1, 1}) return sum_over_two_ranks(mine.select(0, 0), owners.group);
  auto all = funcol::all_gather(mine, 0, counts, owners.group);
  funcol::wait(all, owners.group);
  std::vector<int64_t> order(ranges.size());
  std::iota(order.begin(), order.end(), 0);
  const auto begin_of = [&](int64_t i) { return ranges[static_cast<size_t>(i)].begin; };
  std::sort(order.begin(), order.end(), [&](int64_t l, int64_t r) { return begin_of(l) < begin_of(r); });
  const InvariantScopePaused paused;
  if (!std::is_sorted(order.begin(), order.end())) all = all.index_select(0, at::tensor(order));
  std::sort(ranges.begin(), ranges.end(), [](const auto& l, const auto& r) { return l.begin < r.begin; });
  return add_subtrees(all, terms, ranges);
}

at::Tensor sum_on_mesh(const SummedOp& call, std::vector<c10::IValue> args, const SubtreeKernel& kernel) {
  const auto& entry = propagate::entry_of(call.op);
  detail::promote_plain_tensors(entry, args.data());
  propagate::Key key;
  detail::read_boxed(entry, args, key);
  const Decision& decision = detail::choose(entry, args, key);
  TESSERA_CHECK(decision.kind == Decision::Kind::Strategies, InternalError, call.op, " has no strategies");
  auto& mesh = *key.mesh();

  std::vector<SpecRef> specs;
  std::vector<const at::Tensor*> tensors;
  detail::for_each_tensor(entry, args, [&](const at::Tensor& t, int, int) {
    const auto index = tensors.size();
    const bool moves = !decision.want.empty() && decision.want[index];
    specs.push_back(moves ? decision.want[index] : is_dtensor(t) ? detail::meta_of(t).spec : SpecRef());
    tensors.push_back(&t);
    TESSERA_CHECK(!specs.back() || !specs.back()->has_partial(), ShardingError, "Numerics::Invariant: ", call.op,
                  " has a partial input, ", specs.back()->describe(),
                  ", whose sum has the order of the mesh; redistribute it before the scope begins");
  });
  TESSERA_CHECK(specs[static_cast<size_t>(call.tensor)], InternalError, call.op, ": the summed tensor is plain");

  const auto& out = decision.outs[0];
  Placements placements(out.placements.begin(), out.placements.end());
  std::vector<int64_t> axes;  // over which the terms are sharded
  for (size_t a = 0; a < placements.size(); a++) {
    if (!placements[a].is_partial()) continue;
    if (mesh.shape[a] > 1) axes.push_back(static_cast<int64_t>(a));
    placements[a] = Replicate();
  }
  const auto next = next_sum(call.op, specs[static_cast<size_t>(call.tensor)]->sizes[static_cast<size_t>(call.dim())]);
  const auto& all = next.terms;
  std::optional<SubtreeOwners> owners;
  if (!axes.empty() && all.shard_count == 0 && !next.context)
    owners = find_owners(mesh, axes, *specs[static_cast<size_t>(call.tensor)], call.dim());
  if (!axes.empty() && !owners)
    for (auto& spec : specs)
      if (spec) spec = gathered_over(*spec, axes);

  std::vector<at::Tensor> locals;
  std::vector<detail::RedistributedInput> moved;
  for (size_t i = 0; i < tensors.size(); i++) {
    const bool moves = specs[i] && specs[i] != detail::meta_of(*tensors[i]).spec;
    locals.push_back(moves ? at::Tensor() : detail::local_or_self(*tensors[i]));
    if (moves) moved.push_back({tensors[i], specs[i].get(), static_cast<int>(i), {}});
  }
  detail::redistribute_all(entry, moved);
  for (auto& input : moved) locals[static_cast<size_t>(input.index)] = std::move(input.local);
  const auto& summed = specs[static_cast<size_t>(call.tensor)];
  const DeviceMesh handle(c10::intrusive_ptr<detail::MeshState>::reclaim_copy(&mesh));
  const auto spec = intern(handle, placements, out.sizes, tessera::contiguous_strides(out.sizes),
                           locals[0].scalar_type(), locals[0].device());
  auto mine = all;
  if (next.context) {  // the locals have all terms of this rank's tokens
    const InvariantScopePaused paused;
    for (size_t i = 0; i < locals.size(); i++) locals[i] = gather_tokens(locals[i], call.dims[i], next);
  } else {
    mine.owned = range_or_empty(summed->local_ranges(call.dim()));
  }
  const auto dim0 = out.sizes.empty() ? IndexRange{0, 1} : range_or_empty(spec->local_ranges(0));
  at::Tensor subtrees;
  {
    const InvariantScopePaused paused;
    subtrees = kernel(locals, mine, dim0);
  }
  at::Tensor local;
  if (!owners) {
    const InvariantScopePaused paused;
    local = add_subtrees(subtrees, mine.terms, subtrees_of(mine));
  } else {
    local = gather_and_add(subtrees, mine.terms, *owners);
  }
  return detail::wrap(std::move(local), spec);
}

}  // namespace

at::Tensor sum_over_mesh(const SummedOp& call, int64_t result_dim0_size, const SubtreeKernel& kernel) {
  const at::AutoDispatchBelowADInplaceOrView below;
  std::vector<at::Tensor> tensors;
  for (const auto& v : call.args)
    if (v.isTensor() && v.toTensor().defined()) tensors.push_back(v.toTensor());
  if (std::any_of(tensors.begin(), tensors.end(), [](const auto& t) { return is_dtensor(t); }))
    return sum_on_mesh(call, call.args, kernel);
  const InvariantScopePaused paused;
  const auto next = next_sum(call.op, tensors[static_cast<size_t>(call.tensor)].size(call.dim()));
  if (next.context)
    for (size_t i = 0; i < tensors.size(); i++) tensors[i] = gather_tokens(tensors[i], call.dims[i], next);
  const auto subtrees = kernel(tensors, next.terms, {0, result_dim0_size});
  return add_subtrees(subtrees, next.terms.terms, subtrees_of(next.terms));
}

at::Tensor sum_over_two_ranks(const at::Tensor& x, const comm::Group& group) {
  TESSERA_CHECK(group->size() == 2, InternalError, "a sum over ", group->size(), " ranks has several orders");
  const InvariantScopePaused paused;  // which refuses an all-reduce
  auto sum = funcol::all_reduce(x, ReduceOp::Sum, group);
  funcol::wait(sum, group);
  return sum;
}

}  // namespace tessera::numerics
