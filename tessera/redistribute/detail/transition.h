#pragma once
#include "tessera/redistribute/detail/plan.h"

#include <optional>

// What one step can do: the moves of one mesh axis, and when the other axes let it happen.
namespace tessera::redistribute::detail {

// The move that takes one axis from one placement to another; none where no single move does.
//
//   from   to     move
//   R      S      slice            own piece
//   R      P      divide, nothing  sum: value/n; norm: value/n^(1/p); avg, max, min: the value is its own term
//   S      R      all_gather
//   S      S'     all_to_all       another dim, or the same one cut in another way
//   P      R      all_reduce
//   P      S      reduce_scatter
//   S      P      none             it would have to be gathered first: ask for R
//   P      P'     none             terms of one kind are not terms of another
//   R      P(product), P(mask)     none: no term stands for the value
std::optional<Move> direct_move(const Placement& from, const Placement& to);

// Two ways of cutting one dim that give every rank the same piece, whatever its extent.
bool cuts_alike(const Placement& a, const Placement& b, int64_t ranks);

// May `axis` enter, or leave, the cut that it has in `state`? Only the last cut of a dim can be undone: with
// [S(0), S(0)] the second axis can go, the first one not before it. With [SS(0,n), S(0)] it is the first axis.
bool is_last_cut(PlacementsRef state, c10::IntArrayRef mesh_shape, int64_t axis);

// May `axis` be reduced? The value is the reduction over the first axis of the reductions over the next: in
// [P(sum), P(max)] the maxima are taken first. Sum, avg and mask may change places.
bool is_last_reduction(PlacementsRef state, int64_t axis);

// Can the axis take the step from state to state, where only `axis` differs? Gives the move.
std::optional<Move> legal_move(PlacementsRef from, PlacementsRef to, c10::IntArrayRef mesh_shape, int64_t axis);

// Bytes held by the rank at coordinate 0, which holds as much as any: the same figure on every rank.
double largest_local_bytes(const Problem& problem, PlacementsRef state);

Step make_step(const Problem& problem, Move move, c10::IntArrayRef axes, PlacementsRef before, const Placement& to);
double cost_of(const Problem& problem, const Step& step, PlacementsRef before);

}  // namespace tessera::redistribute::detail
