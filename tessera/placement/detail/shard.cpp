#include "tessera/placement/detail/shard.h"

#include "tessera/base/error.h"

#include <algorithm>

namespace tessera {
namespace {

int64_t ceil_div(int64_t a, int64_t b) { return a / b + (a % b != 0); }

// min(a * b, most), also if the product is not an int64. Requires: none is negative.
int64_t product_up_to(int64_t a, int64_t b, int64_t most) {
  int64_t product = 0;
  return __builtin_mul_overflow(a, b, &product) ? most : std::min(product, most);
}

// The chunk of rank i when positions 0..size-1 are split in n chunks that begin at multiples of block.
//   10 over 4 -> [0,3) [3,6) [6,9) [9,10)       5 over 4 -> [0,2) [2,4) [4,5) [5,5)
IndexRange chunk(int64_t size, int64_t n, int64_t i, int64_t block = 1) {
  const int64_t each = product_up_to(ceil_div(ceil_div(size, block), n), block, size);
  return {product_up_to(i, each, size), product_up_to(i + 1, each, size)};
}

// The global indices at the positions `taken` of the list `held`.
// held [0,3) [5,8), taken [1,4) -> [1,3) [5,6)
IndexRanges compose(const IndexRanges& held, const IndexRanges& taken) {
  IndexRanges result;
  for (const auto& wanted : taken) {
    int64_t position = 0;  // of the first index of h
    for (const auto& h : held) {
      int64_t begin = std::max(wanted.begin, position), end = std::min(wanted.end, position + h.end - h.begin);
      if (begin < end) append_range(result, {h.begin + begin - position, h.begin + end - position});
      position += h.end - h.begin;
    }
  }
  return result;
}

// The number of leading axes of `order` that together give `parts` shards; 0 if none do.
size_t leading_axes_giving(int64_t parts, const ShardOrder& order, c10::IntArrayRef mesh_shape) {
  int64_t given = 1;
  for (size_t m = 0; m < order.size() && given < parts; m++)
    if ((given *= mesh_shape[order[m].axis]) == parts) return m + 1;
  return 0;
}

}  // namespace

int64_t shard_size(const Placement& placement, int64_t size, int64_t n, int64_t i) {
  if (placement.is_shard() || placement.factor == 1) {
    auto [begin, end] = chunk(size, n, i, placement.is_shard() ? placement.factor : placement.block);
    return end - begin;
  }
  int64_t held = 0;
  for (const auto& range : shard_ranges(placement, size, n, i)) held += range.end - range.begin;
  return held;
}

std::vector<int64_t> shard_sizes(const Placement& placement, int64_t size, int64_t n) {
  std::vector<int64_t> sizes(static_cast<size_t>(n));
  for (int64_t i = 0; i < n; i++) sizes[i] = shard_size(placement, size, n, i);
  return sizes;
}

IndexRanges shard_ranges(const Placement& placement, int64_t size, int64_t n, int64_t i) {
  TESSERA_CHECK(placement.is_sharded(), InternalError, "shard_ranges of ", placement);
  IndexRanges ranges;
  if (placement.is_shard()) {
    append_range(ranges, chunk(size, n, i, placement.factor));
    return ranges;
  }
  for (int64_t j = 0; j < placement.factor; j++) {
    auto part = chunk(size, placement.factor, j);
    auto own = chunk(part.end - part.begin, n, i, placement.block);
    append_range(ranges, {part.begin + own.begin, part.begin + own.end});
  }
  return ranges;
}

// Goes from right to left. A plain shard is inserted before the axes found so far. A strided shard is inserted after
// the axes that its factor counts, or before all axes if no such axes exist. With a block its factor counts sections of
// the dim, not axes. So the last axis of the order can always
// be undone without a change to the others.
ShardOrder shard_order(PlacementsRef placements, c10::IntArrayRef mesh_shape, int64_t d) {
  ShardOrder order;
  for (auto axis = static_cast<int64_t>(placements.size()) - 1; axis >= 0; axis--) {
    auto placement = placements[axis];
    if (!placement.is_sharded(d)) continue;
    const bool counts_axes = !placement.is_shard() && placement.block == 1;
    size_t position = counts_axes ? leading_axes_giving(placement.factor, order, mesh_shape) : 0;
    if (position > 0) placement = Shard(d);
    order.insert(order.begin() + position, AxisShard{axis, placement});
  }
  return order;
}

IndexRanges local_ranges(PlacementsRef placements, c10::IntArrayRef mesh_shape, c10::IntArrayRef coordinate, int64_t d,
                         int64_t size) {
  IndexRanges held;
  append_range(held, {0, size});
  int64_t extent = size;
  for (const auto& [axis, placement] : shard_order(placements, mesh_shape, d)) {
    held = compose(held, shard_ranges(placement, extent, mesh_shape[axis], coordinate[axis]));
    extent = shard_size(placement, extent, mesh_shape[axis], coordinate[axis]);
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
  for (const auto& [axis, placement] : shard_order(placements.slice(0, static_cast<size_t>(axes)), mesh_shape, d))
    size = shard_size(placement, size, mesh_shape[axis], coordinate[axis]);
  return size;
}

Placements drop_redundant_blocks(PlacementsRef placements, c10::IntArrayRef mesh_shape, c10::IntArrayRef sizes) {
  Placements out(placements.begin(), placements.end());
  for (size_t a = 0; a < out.size(); a++) {
    if (!out[a].is_sharded() || (out[a].is_shard() ? out[a].factor : out[a].block) == 1) continue;
    const auto dim = out[a].dim;
    const bool alone = std::count_if(out.begin(), out.end(), [&](const auto& p) { return p.is_sharded(dim); }) == 1;
    const int64_t size = sizes[dim], n = mesh_shape[a];
    // All shards but the last ones have the size of the first.
    const auto without = out[a].is_shard() ? Shard(dim) : StridedShard(dim, out[a].factor);
    if (alone && shard_size(out[a], size, n, 0) == shard_size(without, size, n, 0)) out[a] = without;
  }
  return out;
}

bool is_even(PlacementsRef placements, c10::IntArrayRef mesh_shape, int64_t d, int64_t size) {
  for (const auto& [axis, placement] : shard_order(placements, mesh_shape, d)) {
    int64_t n = mesh_shape[axis], first = shard_size(placement, size, n, 0);
    if (first != shard_size(placement, size, n, n - 1)) return false;  // sizes never grow with i
    size = first;
  }
  return true;
}

}  // namespace tessera
