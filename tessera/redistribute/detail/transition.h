#pragma once
#include "tessera/redistribute/detail/plan.h"

#include <optional>

// The moves of one mesh axis, and the states of the other axes that allow a move.
namespace tessera::redistribute::detail {

// The move that changes one axis from one placement to another, or none if it needs several moves.
//
//   from   to     move
//   R      S      slice            each rank keeps its own shard
//   R      P      divide, nothing  sum: value/n; norm: value/n^(1/p); avg, max, min: every rank keeps the value
//   S      R      all_gather
//   S      S'     all_to_all       another dim, or the same dim sharded in another way
//   P      R      all_reduce
//   P      S      reduce_scatter
//   S      P      none             it must be gathered first: redistribute to R
//   P      P'     none             it must be reduced first
//   R      P(product), P(mask)     none
std::optional<Move> direct_move(const Placement& from, const Placement& to);

// True if both placements give every rank the same shard, for every size of the dim.
bool same_shards(const Placement& a, const Placement& b);

// True if a step can shard or unshard `axis` as in `state`. Only the last axis of the shard order can change: with
// [S(0), S(0)] the second axis must be unsharded before the first. With [SS(0,n), S(0)] it is the first axis.
bool is_last_shard(PlacementsRef state, c10::IntArrayRef mesh_shape, int64_t axis);

// True if `axis` can be reduced next. The value is the reduction over the first axis of the reductions over the later
// axes: in [P(sum), P(max)] the max is taken first. Sum, avg and mask can be reduced in any order.
bool is_last_reduction(PlacementsRef state, int64_t axis);

// The move from one state to another that differs only on `axis`, or none if the other axes do not allow it. On an axis
// of one rank every move is Nothing: all placements have the same local tensor.
std::optional<Move> legal_move(PlacementsRef from, PlacementsRef to, c10::IntArrayRef mesh_shape, int64_t axis);

// Bytes of the local tensor at coordinate 0, the largest one. The result is the same on every rank.
double largest_local_bytes(const Problem& problem, PlacementsRef state);

PlanStep make_step(const Problem& problem, Move move, c10::IntArrayRef axes, PlacementsRef before, const Placement& to);
double cost_of(const Problem& problem, const PlanStep& step, PlacementsRef before);

}  // namespace tessera::redistribute::detail
