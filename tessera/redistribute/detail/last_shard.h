#pragma once
#include "tessera/mesh/device_mesh.h"
#include "tessera/placement/detail/shard.h"

#include <ATen/core/Tensor.h>

namespace tessera::redistribute::detail {

using Lengths = c10::SmallVector<int64_t, 8>;  // one per rank of a group

// The last axis of a dim's shard order, as the process group of that axis sees it. It shards positions 0..extent-1.
// `extent` is the size of the dim after the other axes; it is the same for every rank of the group.
//
//   rank order        the shards of rank 0, 1, ...       as a collective sends and receives them
//   position order    the order of the tensor's indices   differs only where shards have several ranges
//
//   SS(0,2) of 8 over 2:   rank order 0 1 4 5 | 2 3 6 7      position order 0 1 2 3 4 5 6 7
struct LastShard {
  Placement placement;
  int64_t dim, extent, ranks, rank;

  LastShard(const tessera::detail::MeshState& mesh, PlacementsRef state, int64_t axis, c10::IntArrayRef sizes);

  bool same_order() const { return placement.is_shard() || placement.factor == 1 || ranks == 1; }
  Lengths lengths() const;
  IndexRanges ranges(int64_t of_rank) const { return shard_ranges(placement, extent, ranks, of_rank); }
};

// These functions work along dim x_dim of x.
at::Tensor own_shard(const at::Tensor& x, int64_t x_dim, const LastShard& shard);  // a contiguous copy
at::Tensor to_rank_order(const at::Tensor& x, int64_t x_dim, const LastShard& shard);
at::Tensor to_position_order(const at::Tensor& x, int64_t x_dim, const LastShard& shard);

// An all-to-all from one way to shard a dim to another: what this rank sends to and receives from each rank.
struct ReshardExchange {
  Lengths sent, received;
  IndexRanges pack;    // local positions, in the order in which they are sent
  IndexRanges unpack;  // positions in the received data, in the order of the new shard

  ReshardExchange(const LastShard& from, const LastShard& to);
};

// The given ranges of x, as a view where possible. Gives x itself if they cover all of it in order.
at::Tensor take(const at::Tensor& x, int64_t x_dim, const IndexRanges& ranges);

}  // namespace tessera::redistribute::detail
