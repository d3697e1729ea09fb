#include "tessera/redistribute/detail/last_shard.h"

#include <ATen/ops/cat.h>

#include <algorithm>
#include <vector>

namespace tessera::redistribute::detail {
namespace {

void append(Runs& runs, Run run) {
  if (run.begin == run.end) return;
  if (!runs.empty() && runs.back().end == run.begin)
    runs.back().end = run.end;
  else
    runs.push_back(run);
}

// A stretch of positions, and where it lies in some tensor.
struct Placed {
  Run positions;
  int64_t offset;
};
using Stretches = c10::SmallVector<Placed, 8>;

Runs in_order_of_positions(Stretches stretches) {
  std::sort(stretches.begin(), stretches.end(),
            [](const Placed& a, const Placed& b) { return a.positions.begin < b.positions.begin; });
  Runs order;
  for (const auto& [positions, offset] : stretches) append(order, {offset, offset + positions.end - positions.begin});
  return order;
}

// What two lists of runs share, with its offset in the concatenation of the first.
Stretches overlap(const Runs& a, const Runs& b) {
  Stretches shared;
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

LastCut::LastCut(const tessera::detail::MeshState& mesh, PlacementsRef state, int64_t axis, c10::IntArrayRef sizes)
    : cut(state[axis]), dim(cut.dim), extent(sizes[dim]), ranks(mesh.shape[axis]), rank(mesh.coordinate[axis]) {
  for (const auto& [other, made] : shard_order(state, mesh.shape, dim)) {
    if (other == axis)
      cut = made;
    else
      extent = shard_size(made, extent, mesh.shape[other], mesh.coordinate[other]);
  }
}

Lengths LastCut::lengths() const {
  Lengths result(static_cast<size_t>(ranks));
  for (int64_t i = 0; i < ranks; i++) result[i] = shard_size(cut, extent, ranks, i);
  return result;
}

at::Tensor take(const at::Tensor& x, int64_t x_dim, const Runs& runs) {
  if (runs.empty()) return x.slice(x_dim, 0, 0);
  if (runs.size() == 1) {
    auto [begin, end] = runs[0];
    return begin == 0 && end == x.size(x_dim) ? x : x.slice(x_dim, begin, end);
  }
  std::vector<at::Tensor> parts;
  for (auto [begin, end] : runs) parts.push_back(x.slice(x_dim, begin, end));
  return at::cat(parts, x_dim);
}

at::Tensor own_piece(const at::Tensor& x, int64_t x_dim, const LastCut& cut) {
  auto runs = cut.runs(cut.rank);
  auto piece = take(x, x_dim, runs);
  return runs.size() > 1 ? piece : piece.clone(at::MemoryFormat::Contiguous);
}

at::Tensor to_rank_order(const at::Tensor& x, int64_t x_dim, const LastCut& cut) {
  if (cut.same_order()) return x;
  Runs order;
  for (int64_t r = 0; r < cut.ranks; r++)
    for (const auto& run : cut.runs(r)) append(order, run);
  return take(x, x_dim, order);
}

at::Tensor to_position_order(const at::Tensor& x, int64_t x_dim, const LastCut& cut) {
  if (cut.same_order()) return x;
  Stretches stretches;
  int64_t offset = 0;
  for (int64_t r = 0; r < cut.ranks; r++)
    for (const auto& run : cut.runs(r)) {
      stretches.push_back({run, offset});
      offset += run.end - run.begin;
    }
  return take(x, x_dim, in_order_of_positions(std::move(stretches)));
}

Exchange::Exchange(const LastCut& from, const LastCut& to) {
  auto mine_before = from.runs(from.rank), mine_after = to.runs(to.rank);
  Stretches arrived;
  int64_t arrived_length = 0;
  for (int64_t r = 0; r < from.ranks; r++) {
    sent.push_back(0);
    for (const auto& [positions, offset] : overlap(mine_before, to.runs(r))) {
      int64_t length = positions.end - positions.begin;
      append(pack, {offset, offset + length});
      sent.back() += length;
    }
    received.push_back(0);
    for (const auto& shared : overlap(from.runs(r), mine_after)) {
      int64_t length = shared.positions.end - shared.positions.begin;
      arrived.push_back({shared.positions, arrived_length});
      arrived_length += length;
      received.back() += length;
    }
  }
  unpack = in_order_of_positions(std::move(arrived));
}

}  // namespace tessera::redistribute::detail
