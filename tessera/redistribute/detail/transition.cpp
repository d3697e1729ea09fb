#include "tessera/redistribute/detail/transition.h"

#include "tessera/redistribute/detail/cost.h"

#include <algorithm>
#include <cmath>

namespace tessera::redistribute::detail {
namespace {

std::optional<Move> from_replicate(const Placement& to) {
  switch (to.kind) {
    case Placement::Kind::Replicate:
      return Move::Nothing;
    case Placement::Kind::Shard:
    case Placement::Kind::StridedShard:
      return Move::Slice;
    case Placement::Kind::Partial:
      if (to.op == ReduceOp::Sum) return Move::Divide;
      if (to.op == ReduceOp::Product) return {};
      return Move::Nothing;
    case Placement::Kind::NormPartial:
      return std::isinf(to.norm) ? Move::Nothing : Move::Divide;
    case Placement::Kind::MaskPartial:
      return {};
  }
  return {};
}

}  // namespace

std::optional<Move> direct_move(const Placement& from, const Placement& to) {
  if (from == to) return Move::Nothing;
  if (from.is_replicate()) return from_replicate(to);
  if (from.is_sharded()) {
    if (to.is_replicate()) return Move::AllGather;
    if (to.is_sharded()) return Move::AllToAll;
    return {};
  }
  if (to.is_replicate()) return Move::AllReduce;
  if (to.is_sharded()) return Move::ReduceScatter;
  return {};
}

bool same_shards(const Placement& a, const Placement& b) {
  return a.is_sharded() && b.is_sharded(a.dim) && a.factor == 1 && b.factor == 1;
}

bool is_last_shard(PlacementsRef state, c10::IntArrayRef mesh_shape, int64_t axis) {
  bool strided = false, nested = false;
  for (size_t other = 0; other < state.size(); other++) {
    if (!state[other].is_sharded(state[axis].dim)) continue;
    strided |= !state[other].is_shard();
    nested |= static_cast<int64_t>(other) > axis;
  }
  return strided ? shard_order(state, mesh_shape, state[axis].dim).back().axis == axis : !nested;
}

bool is_last_reduction(PlacementsRef state, int64_t axis) {
  auto is_linear = [](const Placement& p) {
    return p.is_partial(ReduceOp::Sum) || p.is_partial(ReduceOp::Avg) || p.kind == Placement::Kind::MaskPartial;
  };
  const auto& mine = state[axis];
  for (const auto& later : state.slice(static_cast<size_t>(axis) + 1))
    if (later.is_partial() && later != mine && !(is_linear(later) && is_linear(mine))) return false;
  return true;
}

std::optional<Move> legal_move(PlacementsRef from, PlacementsRef to, c10::IntArrayRef mesh_shape, int64_t axis) {
  auto move = direct_move(from[axis], to[axis]);
  if (!move) return {};
  if (from[axis].is_partial() && !is_last_reduction(from, axis)) return {};
  if (mesh_shape[axis] == 1) return Move::Nothing;
  if (from[axis].is_sharded() && !is_last_shard(from, mesh_shape, axis)) return {};
  if (to[axis].is_sharded() && !is_last_shard(to, mesh_shape, axis)) return {};
  // reduce(x / n) = reduce(x) / n holds for every reduction but the product.
  if (*move == Move::Divide)
    for (const auto& later : from.slice(static_cast<size_t>(axis) + 1))
      if (later.is_partial(ReduceOp::Product)) return {};
  if (*move == Move::AllToAll && same_shards(from[axis], to[axis])) return Move::Nothing;
  return move;
}

double largest_local_bytes(const Problem& problem, PlacementsRef state) {
  static constexpr int64_t kZeros[16] = {};
  auto coordinate = c10::IntArrayRef(kZeros, state.size());
  auto bytes = static_cast<double>(problem.element_size);
  for (auto size : local_sizes(state, problem.mesh_shape, coordinate, problem.sizes))
    bytes *= static_cast<double>(size);
  return bytes;
}

namespace {

int64_t ranks_of(const Problem& problem, c10::IntArrayRef axes) {
  int64_t ranks = 1;
  for (auto axis : axes) ranks *= problem.mesh_shape[axis];
  return ranks;
}

}  // namespace

PlanStep make_step(const Problem& problem, Move move, c10::IntArrayRef axes, PlacementsRef before,
                   const Placement& to) {
  return {.move = move,
          .axes = {axes.begin(), axes.end()},
          .from = before[axes[0]],
          .to = to,
          .bytes = wire_bytes(move, ranks_of(problem, axes), largest_local_bytes(problem, before))};
}

double cost_of(const Problem& problem, const PlanStep& step, PlacementsRef before) {
  return step_cost(step.move, ranks_of(problem, step.axes), largest_local_bytes(problem, before));
}

}  // namespace tessera::redistribute::detail
