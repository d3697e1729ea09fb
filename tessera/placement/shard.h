#pragma once
#include "tessera/placement/placement.h"

#include <c10/util/ArrayRef.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <vector>

// The only home of shard arithmetic: which indices of a dim a rank holds. Pure; no tensors, no ranks of its own.
//
// A dim cut by several mesh axes is cut left to right: the outer axis first, the next one cuts each piece. What a rank
// holds of a dim is therefore a list of ascending runs [begin, end) of global indices: one run, unless a strided cut
// takes part.
namespace tessera {

using Sizes = c10::SmallVector<int64_t, 6>;

struct Run {
  int64_t begin, end;  // global indices
  bool operator==(const Run&) const = default;
};
using Runs = c10::SmallVector<Run, 2>;

// How many indices rank i of n holds when `size` of them are cut by `cut`. Requires cut.is_cut().
// Examples:  S(0), size 10, n 4 -> 3 3 3 1      S(0,4), size 12, n 2 -> 8 4      SS(0,2), size 10, n 4 -> 4 4 2 0
int64_t shard_size(const Placement& cut, int64_t size, int64_t n, int64_t i);
std::vector<int64_t> shard_sizes(const Placement& cut, int64_t size, int64_t n);  // for every i

// The runs rank i holds of positions 0..size-1.
Runs shard_runs(const Placement& cut, int64_t size, int64_t n, int64_t i);

// The whole picture for one rank: global indices held along dim d. Placements that do not cut d are ignored.
Runs local_runs(PlacementsRef placements, c10::IntArrayRef mesh_shape, c10::IntArrayRef coordinate, int64_t d, int64_t size);

// Sizes of a rank's piece of a tensor of `sizes`; the extent of one dim of it after the first `axes` mesh axes.
Sizes local_sizes(PlacementsRef placements, c10::IntArrayRef mesh_shape, c10::IntArrayRef coordinate, c10::IntArrayRef sizes);
int64_t extent_after(PlacementsRef placements, c10::IntArrayRef mesh_shape, c10::IntArrayRef coordinate, int64_t d,
                     int64_t size, int64_t axes);

// Does every rank hold equally many indices of dim d?
bool is_even(PlacementsRef placements, c10::IntArrayRef mesh_shape, int64_t d, int64_t size);

}  // namespace tessera
