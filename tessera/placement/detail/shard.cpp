#include "tessera/placement/detail/shard.h"

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

// How many of the cuts made first give together `pieces`; 0: no such number.
size_t cuts_giving(int64_t pieces, const ShardOrder& order, c10::IntArrayRef mesh_shape) {
  int64_t given = 1;
  for (size_t m = 0; m < order.size() && given < pieces; m++)
    if ((given *= mesh_shape[order[m].axis]) == pieces) return m + 1;
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
  TESSERA_CHECK(cut.is_sharded(), InternalError, "shard_runs of ", cut);
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

// Right to left: a plain cut goes before those found so far; a strided one after as many as give the pieces it counts,
// or before all of them if none do. So the last cut in the order can always be undone without touching the others.
ShardOrder shard_order(PlacementsRef placements, c10::IntArrayRef mesh_shape, int64_t d) {
  ShardOrder order;
  for (auto axis = static_cast<int64_t>(placements.size()) - 1; axis >= 0; axis--) {
    auto cut = placements[axis];
    if (!cut.is_sharded(d)) continue;
    size_t place = cut.is_shard() ? 0 : cuts_giving(cut.factor, order, mesh_shape);
    if (place > 0) cut = Shard(d);
    order.insert(order.begin() + place, Cut{axis, cut});
  }
  return order;
}

Runs local_runs(PlacementsRef placements, c10::IntArrayRef mesh_shape, c10::IntArrayRef coordinate, int64_t d,
                int64_t size) {
  Runs held;
  append(held, {0, size});
  int64_t extent = size;
  for (const auto& [axis, cut] : shard_order(placements, mesh_shape, d)) {
    held = compose(held, shard_runs(cut, extent, mesh_shape[axis], coordinate[axis]));
    extent = shard_size(cut, extent, mesh_shape[axis], coordinate[axis]);
  }
  return held;
}

Sizes local_sizes(PlacementsRef placements, c10::IntArrayRef mesh_shape, c10::IntArrayRef coordinate,
                  c10::IntArrayRef sizes) {
  Sizes result(sizes.begin(), sizes.end());
  for (const auto& p : placements) {
    if (!p.is_sharded()) continue;
    auto& extent = result[p.dim];
    extent =
        extent_after(placements, mesh_shape, coordinate, p.dim, sizes[p.dim], static_cast<int64_t>(placements.size()));
  }
  return result;
}

int64_t extent_after(PlacementsRef placements, c10::IntArrayRef mesh_shape, c10::IntArrayRef coordinate, int64_t d,
                     int64_t size, int64_t axes) {
  for (const auto& [axis, cut] : shard_order(placements.slice(0, static_cast<size_t>(axes)), mesh_shape, d))
    size = shard_size(cut, size, mesh_shape[axis], coordinate[axis]);
  return size;
}

Placements plain_where_alike(PlacementsRef placements, c10::IntArrayRef mesh_shape, c10::IntArrayRef sizes) {
  Placements out(placements.begin(), placements.end());
  for (size_t a = 0; a < out.size(); a++) {
    if (!out[a].is_shard() || out[a].factor == 1) continue;
    const bool alone = std::count_if(out.begin(), out.end(), [&](const auto& p) { return p.is_sharded(out[a].dim); }) == 1;
    const int64_t size = sizes[out[a].dim], n = mesh_shape[a];
    // Pieces but the last are equal, so the first one tells.
    if (alone && shard_size(out[a], size, n, 0) == shard_size(Shard(out[a].dim), size, n, 0)) out[a].factor = 1;
  }
  return out;
}

bool is_even(PlacementsRef placements, c10::IntArrayRef mesh_shape, int64_t d, int64_t size) {
  for (const auto& [axis, cut] : shard_order(placements, mesh_shape, d)) {
    int64_t n = mesh_shape[axis], first = shard_size(cut, size, n, 0);
    if (first != shard_size(cut, size, n, n - 1)) return false;  // sizes never grow with i
    size = first;
  }
  return true;
}

}  // namespace tessera
