#include "tessera/redistribute/detail/last_shard.h"

#include "tessera/placement/detail/take_ranges.h"

#include <ATen/ops/cat.h>

#include <algorithm>
#include <vector>

namespace tessera::redistribute::detail {
namespace {

// A range of positions, and its offset in a tensor that has other ranges before it.
struct OffsetRange {
  IndexRange positions;
  int64_t offset;
};
using OffsetRanges = c10::SmallVector<OffsetRange, 8>;

// Where the ranges are in the tensor, in the order of their positions.
IndexRanges in_order_of_positions(OffsetRanges ranges) {
  std::sort(ranges.begin(), ranges.end(),
            [](const OffsetRange& a, const OffsetRange& b) { return a.positions.begin < b.positions.begin; });
  IndexRanges order;
  for (const auto& [positions, offset] : ranges)
    append_range(order, {offset, offset + positions.end - positions.begin});
  return order;
}

// The intersection of two lists of ranges, with its offsets in the concatenation of the first list.
OffsetRanges overlap(const IndexRanges& a, const IndexRanges& b) {
  OffsetRanges shared;
  int64_t offset = 0;
  for (const auto& x : a) {
    for (const auto& y : b) {
      int64_t begin = std::max(x.begin, y.begin), end = std::min(x.end, y.end);
      if (begin < end) shared.push_back({{begin, end}, offset + begin - x.begin});
    }
    offset += x.end - x.begin;
  }
  return shared;
}

}  // namespace

LastShard::LastShard(const tessera::detail::MeshState& mesh, PlacementsRef state, int64_t axis, c10::IntArrayRef sizes)
    : placement(state[axis]),
      dim(placement.dim),
      extent(sizes[dim]),
      ranks(mesh.shape[axis]),
      rank(mesh.coordinate[axis]) {
  for (const auto& [other, applied] : shard_order(state, mesh.shape, dim)) {
    if (other == axis)
      placement = applied;
    else
      extent = shard_size(applied, extent, mesh.shape[other], mesh.coordinate[other]);
  }
}

Lengths LastShard::lengths() const {
  Lengths result(static_cast<size_t>(ranks));
  for (int64_t i = 0; i < ranks; i++) result[i] = shard_size(placement, extent, ranks, i);
  return result;
}

at::Tensor take(const at::Tensor& x, int64_t x_dim, const IndexRanges& ranges) {
  if (ranges.empty()) return x.slice(x_dim, 0, 0);
  if (ranges.size() == 1) {
    auto [begin, end] = ranges[0];
    return begin == 0 && end == x.size(x_dim) ? x : x.slice(x_dim, begin, end);
  }
  std::vector<at::Tensor> parts;
  for (auto [begin, end] : ranges) parts.push_back(x.slice(x_dim, begin, end));
  return at::cat(parts, x_dim);
}

at::Tensor own_shard(const at::Tensor& x, int64_t x_dim, const LastShard& shard) {
  return take_ranges(x, x_dim, shard.ranges(shard.rank));
}

at::Tensor to_rank_order(const at::Tensor& x, int64_t x_dim, const LastShard& shard) {
  if (shard.same_order()) return x;
  IndexRanges order;
  for (int64_t r = 0; r < shard.ranks; r++)
    for (const auto& range : shard.ranges(r)) append_range(order, range);
  return take(x, x_dim, order);
}

at::Tensor to_position_order(const at::Tensor& x, int64_t x_dim, const LastShard& shard) {
  if (shard.same_order()) return x;
  OffsetRanges ranges;
  int64_t offset = 0;
  for (int64_t r = 0; r < shard.ranks; r++)
    for (const auto& range : shard.ranges(r)) {
      ranges.push_back({range, offset});
      offset += range.end - range.begin;
    }
  return take(x, x_dim, in_order_of_positions(std::move(ranges)));
}

ReshardExchange::ReshardExchange(const LastShard& from, const LastShard& to) {
  auto mine_before = from.ranges(from.rank), mine_after = to.ranges(to.rank);
  OffsetRanges arrived;
  int64_t arrived_length = 0;
  for (int64_t r = 0; r < from.ranks; r++) {
    sent.push_back(0);
    for (const auto& [positions, offset] : overlap(mine_before, to.ranges(r))) {
      int64_t length = positions.end - positions.begin;
      append_range(pack, {offset, offset + length});
      sent.back() += length;
    }
    received.push_back(0);
    for (const auto& shared : overlap(from.ranges(r), mine_after)) {
      int64_t length = shared.positions.end - shared.positions.begin;
      arrived.push_back({shared.positions, arrived_length});
      arrived_length += length;
      received.back() += length;
    }
  }
  unpack = in_order_of_positions(std::move(arrived));
}

}  // namespace tessera::redistribute::detail
