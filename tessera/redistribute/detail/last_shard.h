#pragma once
#include "tessera/mesh/device_mesh.h"
#include "tessera/placement/detail/shard.h"

#include <ATen/core/Tensor.h>

namespace tessera::redistribute::detail {

using Lengths = c10::SmallVector<int64_t, 8>;  // one a rank of a group

// The last cut of a dim, seen from the group of its axis: it acts on positions 0..extent-1, where `extent` is what the
// other axes leave of the dim, the same for every rank of the group.
//
//   rank order        the pieces of rank 0, 1, ...   as a collective sends and receives them
//   position order    as they lie in the tensor      differs only where pieces have several runs
//
//   SS(0,2) of 8 over 2:   rank order 0 1 4 5 | 2 3 6 7      position order 0 1 2 3 4 5 6 7
struct LastCut {
  Placement cut;
  int64_t dim, extent, ranks, rank;

  LastCut(const tessera::detail::MeshState& mesh, PlacementsRef state, int64_t axis, c10::IntArrayRef sizes);

  bool same_order() const { return cut.is_shard() || cut.factor == 1 || ranks == 1; }
  Lengths lengths() const;
  Runs runs(int64_t of_rank) const { return shard_runs(cut, extent, ranks, of_rank); }
};

// These act along x's dim x_dim.
at::Tensor own_piece(const at::Tensor& x, int64_t x_dim, const LastCut& cut);  // a contiguous copy
at::Tensor to_rank_order(const at::Tensor& x, int64_t x_dim, const LastCut& cut);
at::Tensor to_position_order(const at::Tensor& x, int64_t x_dim, const LastCut& cut);

// From one way of cutting a dim to another: what this rank sends to each and gets from each.
struct Exchange {
  Lengths sent, received;
  Runs pack;    // local positions, in the order in which they are sent
  Runs unpack;  // places in what was received, in the order in which they lie in the new piece

  Exchange(const LastCut& from, const LastCut& to);
};
at::Tensor take(const at::Tensor& x, int64_t x_dim, const Runs& runs);  // x itself if that is all of it, in order

}  // namespace tessera::redistribute::detail
