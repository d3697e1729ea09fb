#include "tessera/placement/shard.h"

#include "tessera/base/error.h"

#include <algorithm>

namespace tessera {
namespace {

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Rank i's part of positions 0..size-1 cut in n, on multiples of block.
//   10 over 4 -> [0,3) [3,6) [6,9) [9,10)       5 over 4 -> [0,2) [2,4) [4,5) [5,5)
Run chunk(int64_t size, int64_t n, int64_t i, int64_t block = 1) {
  int64_t each = ceil_div(ceil_div(size, block), n) * block;
  return {std::min(i * each, size), std::min((i + 1) * each, size)};
}

void append(Runs& runs, Run run) {
  if (run.begin == run.end) return;
  if (!runs.empty() && runs.back().end == run.begin)
    runs.back().end = run.end;
  else
    runs.push_back(run);
}

// Which global indices stand at the positions `taken` of `held`.
// held [0,3) [5,8), taken [1,4) -> [1,3) [5,6)
Runs compose(const Runs& held, const Runs& taken) {
  Runs result;
  for (const auto& wanted : taken) {
    int64_t position = 0;  // of the first index of h
    for (const auto& h : held) {
      int64_t begin = std::max(wanted.begin, position), end = std::min(wanted.end, position + h.end - h.begin);
      if (begin < end) append(result, {h.begin + begin - position, h.begin + end - position});
      position += h.end - h.begin;
    }
  }
  return result;
}

// How many of `later`, counted from the first, have together as many ranks as `factor`; 0: no such number.
size_t counted_by(int64_t factor, const Cuts& later, c10::IntArrayRef mesh_shape) {
  int64_t ranks = 1;
  for (size_t m = 0; m < later.size() && ranks < factor; m++)
    if ((ranks *= mesh_shape[later[m].axis]) == factor) return m + 1;
  return 0;
}

}  // namespace

int64_t shard_size(const Placement& cut, int64_t size, int64_t n, int64_t i) {
  if (cut.is_shard() || cut.factor == 1) {
    auto [begin, end] = chunk(size, n, i, cut.is_shard() ? cut.factor : 1);
    return end - begin;
  }
  int64_t held = 0;
  for (const auto& run : shard_runs(cut, size, n, i)) held += run.end - run.begin;
  return held;
}

std::vector<int64_t> shard_sizes(const Placement& cut, int64_t size, int64_t n) {
  std::vector<int64_t> sizes(static_cast<size_t>(n));
  for (int64_t i = 0; i < n; i++) sizes[i] = shard_size(cut, size, n, i);
  return sizes;
}

Runs shard_runs(const Placement& cut, int64_t size, int64_t n, int64_t i) {
  TESSERA_CHECK(cut.is_cut(), InternalError, "shard_runs of ", cut);
  Runs runs;
  if (cut.is_shard()) {
    append(runs, chunk(size, n, i, cut.factor));
    return runs;
  }
  for (int64_t j = 0; j < cut.factor; j++) {
    auto piece = chunk(size, cut.factor, j);
    auto part = chunk(piece.end - piece.begin, n, i);
    append(runs, {piece.begin + part.begin, piece.begin + part.end});
  }
  return runs;
}

Cuts cut_order(PlacementsRef placements, c10::IntArrayRef mesh_shape, int64_t d) {
  Cuts order;  // as found so far
  Cuts later;  // the same axes, left to right
  for (auto axis = static_cast<int64_t>(placements.size()) - 1; axis >= 0; axis--) {
    auto cut = placements[axis];
    if (!cut.is_cut(d)) continue;
    size_t place = 0;
    if (!cut.is_shard() && cut.factor > 1) {
      // The axes counted by the factor have cut before if they are the first ones in the order.
      size_t m = counted_by(cut.factor, later, mesh_shape);
      bool first = m > 0 && std::all_of(order.begin(), order.begin() + m, [&](const Cut& made) {
                     return std::any_of(later.begin(), later.begin() + m, [&](const Cut& c) { return c.axis == made.axis; });
                   });
      if (first) {
        place = m;
        cut = Shard(d);
      }
    }
    order.insert(order.begin() + place, Cut{axis, cut});
    later.insert(later.begin(), Cut{axis, cut});
  }
  return order;
}

Runs local_runs(PlacementsRef placements, c10::IntArrayRef mesh_shape, c10::IntArrayRef coordinate, int64_t d,
                int64_t size) {
  Runs held;
  append(held, {0, size});
  int64_t extent = size;
  for (const auto& [axis, cut] : cut_order(placements, mesh_shape, d)) {
    held = compose(held, shard_runs(cut, extent, mesh_shape[axis], coordinate[axis]));
    extent = shard_size(cut, extent, mesh_shape[axis], coordinate[axis]);
  }
  return held;
}

Sizes local_sizes(PlacementsRef placements, c10::IntArrayRef mesh_shape, c10::IntArrayRef coordinate,
                  c10::IntArrayRef sizes) {
  Sizes result(sizes.begin(), sizes.end());
  for (const auto& p : placements) {
    if (!p.is_cut()) continue;
    auto& extent = result[p.dim];
    extent = extent_after(placements, mesh_shape, coordinate, p.dim, sizes[p.dim],
                          static_cast<int64_t>(placements.size()));
  }
  return result;
}

int64_t extent_after(PlacementsRef placements, c10::IntArrayRef mesh_shape, c10::IntArrayRef coordinate, int64_t d,
                     int64_t size, int64_t axes) {
  for (const auto& [axis, cut] : cut_order(placements.slice(0, static_cast<size_t>(axes)), mesh_shape, d))
    size = shard_size(cut, size, mesh_shape[axis], coordinate[axis]);
  return size;
}

bool is_even(PlacementsRef placements, c10::IntArrayRef mesh_shape, int64_t d, int64_t size) {
  for (const auto& [axis, cut] : cut_order(placements, mesh_shape, d)) {
    int64_t n = mesh_shape[axis], first = shard_size(cut, size, n, 0);
    if (first != shard_size(cut, size, n, n - 1)) return false;  // sizes never grow with i
    size = first;
  }
  return true;
}

}  // namespace tessera
