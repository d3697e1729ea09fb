#pragma once
#include "tessera/placement/placement.h"

#include <c10/util/ArrayRef.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <vector>

// The only home of shard arithmetic: which indices of a dim a rank holds. Pure; no tensors, no ranks of its own.
//
// A dim cut by several mesh axes is cut left to right: the outer axis first, the next one cuts each piece. A strided
// cut waits for the axes it counts: in [SS(0,2), S(0)] on a 2x2 mesh the second axis cuts first and the first one cuts
// each of its pieces, whatever the sizes. What a rank holds of a dim is a list of ascending runs [begin, end) of global
// indices: one run, unless a strided cut stands alone.
namespace tessera {

using Sizes = c10::SmallVector<int64_t, 6>;

struct Run {
  int64_t begin, end;  // global indices
  bool operator==(const Run&) const = default;
};
using Runs = c10::SmallVector<Run, 2>;

// How many indices rank i of n holds when `size` of them are cut by `cut`. Requires cut.is_sharded().
// Examples:  S(0), size 10, n 4 -> 3 3 3 1      S(0,4), size 12, n 2 -> 8 4      SS(0,2), size 10, n 4 -> 4 4 2 0
int64_t shard_size(const Placement& cut, int64_t size, int64_t n, int64_t i);
std::vector<int64_t> shard_sizes(const Placement& cut, int64_t size, int64_t n);  // for every i

// The runs rank i holds of positions 0..size-1.
Runs shard_runs(const Placement& cut, int64_t size, int64_t n, int64_t i);

// The cuts of dim d in the order in which they are made; `cut` acts on the positions the cuts before it have left.
// Example:  [SS(0,2), S(0)], mesh 2x2 -> axis 1: S(0), axis 0: S(0)       [SS(0,2), R] -> axis 0: SS(0,2)
struct Cut {
  int64_t axis;
  Placement cut;
  bool operator==(const Cut&) const = default;
};
using ShardOrder = c10::SmallVector<Cut, 4>;
ShardOrder shard_order(PlacementsRef placements, c10::IntArrayRef mesh_shape, int64_t d);

// The whole picture for one rank: global indices held along dim d. Placements that do not cut d are ignored.
Runs local_runs(PlacementsRef placements, c10::IntArrayRef mesh_shape, c10::IntArrayRef coordinate, int64_t d,
                int64_t size);

// Sizes of a rank's piece of a tensor of `sizes`; the extent of one dim of it if only the first `axes` mesh axes cut.
Sizes local_sizes(PlacementsRef placements, c10::IntArrayRef mesh_shape, c10::IntArrayRef coordinate,
                  c10::IntArrayRef sizes);
int64_t extent_after(PlacementsRef placements, c10::IntArrayRef mesh_shape, c10::IntArrayRef coordinate, int64_t d,
                     int64_t size, int64_t axes);

// The same pieces with as few S(d,b) as possible: where cutting on multiples of b cuts nowhere else than S(d) does.
// Example:  S(0,4), size 24, n 2 -> S(0)       S(0,4), size 24, n 4 -> S(0,4): 8 8 8 0, not 6 6 6 6
Placements plain_where_alike(PlacementsRef placements, c10::IntArrayRef mesh_shape, c10::IntArrayRef sizes);

// Does every rank hold equally many indices of dim d?
bool is_even(PlacementsRef placements, c10::IntArrayRef mesh_shape, int64_t d, int64_t size);

}  // namespace tessera
