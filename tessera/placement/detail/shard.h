#pragma once
#include "tessera/placement/placement.h"

#include <c10/util/ArrayRef.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <vector>

// Shard arithmetic: which indices of a dim a rank has. All of it is in this file. Pure functions without tensors.
//
// Several mesh axes can shard one dim. They shard it from left to right: the outer axis first, and each next axis
// shards the shards before it. A strided shard is applied after the axes that its factor counts: in [SS(0,2), S(0)] on
// a 2x2 mesh the second axis shards first, and the first axis shards each of its shards, for any size of the dim. The
// indices that a rank has are a list of ascending ranges [begin, end) of global indices. There is one range unless a
// strided shard is used without the axes that its factor counts.
namespace tessera {

using Sizes = c10::SmallVector<int64_t, 6>;

struct IndexRange {
  int64_t begin, end;  // global indices
  bool operator==(const IndexRange&) const = default;
};
using IndexRanges = c10::SmallVector<IndexRange, 2>;

// Appends a range. Skips an empty range; merges a range that begins where the last one ends.
template <class Ranges>
void append_range(Ranges& ranges, IndexRange range) {
  if (range.begin == range.end) return;
  if (!ranges.empty() && ranges.back().end == range.begin)
    ranges.back().end = range.end;
  else
    ranges.push_back(range);
}

// Number of indices that rank i of n has when `placement` shards `size` indices. Requires placement.is_sharded().
// Examples:  S(0), size 10, n 4 -> 3 3 3 1      S(0,4), size 12, n 2 -> 8 4      SS(0,2), size 10, n 4 -> 4 4 2 0
//            SS(0,2,2), size 12, n 2 -> 8 4
int64_t shard_size(const Placement& placement, int64_t size, int64_t n, int64_t i);
std::vector<int64_t> shard_sizes(const Placement& placement, int64_t size, int64_t n);  // of every rank

// The ranges that rank i has of positions 0..size-1.
IndexRanges shard_ranges(const Placement& placement, int64_t size, int64_t n, int64_t i);

// A mesh axis that shards a dim. `placement` applies to the positions that the axes before it leave.
struct AxisShard {
  int64_t axis;
  Placement placement;
  bool operator==(const AxisShard&) const = default;
};

// The axes that shard dim d, in the order in which they are applied.
// Example:  [SS(0,2), S(0)], mesh 2x2 -> axis 1: S(0), axis 0: S(0)       [SS(0,2), R] -> axis 0: SS(0,2)
using ShardOrder = c10::SmallVector<AxisShard, 4>;
ShardOrder shard_order(PlacementsRef placements, c10::IntArrayRef mesh_shape, int64_t d);

// The global indices of dim d that the rank at `coordinate` has. Placements that do not shard d are ignored.
IndexRanges local_ranges(PlacementsRef placements, c10::IntArrayRef mesh_shape, c10::IntArrayRef coordinate, int64_t d,
                         int64_t size);

// Sizes of the local tensor of the rank at `coordinate`.
Sizes local_sizes(PlacementsRef placements, c10::IntArrayRef mesh_shape, c10::IntArrayRef coordinate,
                  c10::IntArrayRef sizes);
// Size of one dim of it if only the first `axes` mesh axes shard the tensor.
int64_t extent_after(PlacementsRef placements, c10::IntArrayRef mesh_shape, c10::IntArrayRef coordinate, int64_t d,
                     int64_t size, int64_t axes);

// Replaces S(d,b) by S(d), and SS(d,k,b) by SS(d,k), where both give every rank the same shard.
// Example:  S(0,4), size 24, n 2 -> S(0)       S(0,4), size 24, n 4 -> S(0,4): 8 8 8 0, not 6 6 6 6
Placements drop_redundant_blocks(PlacementsRef placements, c10::IntArrayRef mesh_shape, c10::IntArrayRef sizes);

// True if every rank has the same number of indices of dim d.
bool is_even(PlacementsRef placements, c10::IntArrayRef mesh_shape, int64_t d, int64_t size);

}  // namespace tessera
