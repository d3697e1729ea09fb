#include "tessera/data_parallel/fsdp/shard_layout.h"

#include "tessera/base/error.h"

#include <ATen/ScalarOps.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mul.h>

#include <algorithm>
#include <functional>
#include <numeric>
#include <ostream>

namespace tessera::data_parallel::fsdp {
namespace {

int64_t numel(const std::vector<int64_t>& sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), int64_t{1}, std::multiplies<>());
}
int64_t up_to_multiple(int64_t n, int64_t of) { return (n + of - 1) / of * of; }

void write(const at::Tensor& to, const at::Tensor& from, double scale, bool add) {
  if (add)
    to.add_(from, scale);
  else if (scale == 1 || from.scalar_type() != to.scalar_type())
    to.copy_(from).mul_(scale);
  else
    at::mul_out(const_cast<at::Tensor&>(to), from, at::native::wrapped_scalar_tensor(scale));  // NOLINT: a handle
}

}  // namespace

std::ostream& operator<<(std::ostream& out, const Part& part) {
  return out << "[" << part.begin << ", " << part.begin + part.size << ")";
}

ShardLayout ShardLayout::flat(std::vector<Extent> parameters, int64_t ranks, int64_t align) {
  ShardLayout layout(std::move(parameters), ranks);
  int64_t total = 0;
  for (const auto& extent : layout.extents_) {
    total = up_to_multiple(total, align);
    layout.offsets_.push_back(total);
    total += numel(extent.sizes);
  }
  layout.shard_ = up_to_multiple(total, ranks) / ranks;
  layout.padded_ = layout.gathered_numel() != layout.numel_of_all();
  return layout;
}

ShardLayout ShardLayout::per_parameter(std::vector<Extent> parameters, int64_t ranks) {
  ShardLayout layout(std::move(parameters), ranks);
  layout.flat_ = false;
  for (size_t i = 0; i < layout.extents_.size(); i++) {
    layout.offsets_.push_back(layout.shard_);
    layout.shard_ += numel(layout.piece_sizes(i, 0));  // the first rank's is the longest
  }
  layout.padded_ = layout.gathered_numel() != layout.numel_of_all();
  return layout;
}

int64_t ShardLayout::numel_of_all() const {
  int64_t total = 0;
  for (const auto& extent : extents_) total += numel(extent.sizes);
  return total;
}

Part ShardLayout::in_parameter(size_t i, int64_t rank) const {
  const auto& extent = extents_[i];
  const auto within = [](int64_t begin, int64_t end, int64_t size) {
    begin = std::clamp<int64_t>(begin, 0, size);
    return Part{begin, std::clamp<int64_t>(end, begin, size) - begin};
  };
  if (flat_) return within(rank * shard_ - offsets_[i], (rank + 1) * shard_ - offsets_[i], numel(extent.sizes));
  const int64_t size = extent.sizes[static_cast<size_t>(extent.dim)];
  const int64_t chunk = up_to_multiple(size, ranks_) / ranks_;
  return within(rank * chunk, (rank + 1) * chunk, size);
}

std::vector<int64_t> ShardLayout::piece_sizes(size_t i, int64_t rank) const {
  const auto part = in_parameter(i, rank);
  if (flat_ && ranks_ > 1) return {part.size};
  if (flat_) return extents_[i].sizes;
  auto sizes = extents_[i].sizes;
  sizes[static_cast<size_t>(extents_[i].dim)] = part.size;
  return sizes;
}

Part ShardLayout::in_shard(size_t i, int64_t rank) const {
  if (!flat_) return {offsets_[i], numel(piece_sizes(i, rank))};
  const auto part = in_parameter(i, rank);
  return {part.size == 0 ? 0 : offsets_[i] + part.begin - rank * shard_, part.size};
}

at::Tensor ShardLayout::cut(size_t i, const at::Tensor& whole, int64_t rank) const {
  const auto part = in_parameter(i, rank);
  return flat_ ? whole.reshape({-1}).narrow(0, part.begin, part.size)
               : whole.narrow(extents_[i].dim, part.begin, part.size);
}

void ShardLayout::put(size_t i, const at::Tensor& whole, int64_t rank, const at::Tensor& shard) const {
  const auto place = in_shard(i, rank);
  if (place.size == 0) return;
  const auto piece = cut(i, whole, rank);
  shard.narrow(0, place.begin, place.size).view(piece.sizes()).copy_(piece);
}

void ShardLayout::scatter(size_t i, const at::Tensor& whole, const at::Tensor& gathered, double scale, bool add) const {
  const auto& extent = extents_[i];
  if (flat_) return write(gathered.narrow(0, offsets_[i], numel(extent.sizes)).view(extent.sizes), whole, scale, add);
  for (int64_t r = 0; r < ranks_; r++) {
    const auto part = in_parameter(i, r);
    const auto place = in_shard(i, r);
    if (part.size == 0) continue;
    write(gathered.narrow(0, r * shard_ + place.begin, place.size).view(piece_sizes(i, r)),
          whole.narrow(extent.dim, part.begin, part.size), scale, add);
  }
}

at::Tensor ShardLayout::assemble(size_t i, const at::Tensor& gathered) const {
  const auto& extent = extents_[i];
  if (flat_) return gathered.narrow(0, offsets_[i], numel(extent.sizes)).view(extent.sizes);
  if (ranks_ == 1) return gathered.narrow(0, offsets_[i], numel(extent.sizes)).view(extent.sizes);
  auto whole = at::empty(extent.sizes, gathered.options());
  for (int64_t r = 0; r < ranks_; r++) {
    const auto part = in_parameter(i, r);
    const auto place = in_shard(i, r);
    if (part.size == 0) continue;
    whole.narrow(extent.dim, part.begin, part.size)
        .copy_(gathered.narrow(0, r * shard_ + place.begin, place.size).view(piece_sizes(i, r)));
  }
  return whole;
}

}  // namespace tessera::data_parallel::fsdp
