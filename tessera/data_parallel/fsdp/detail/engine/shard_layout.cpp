#include "tessera/data_parallel/fsdp/detail/engine/shard_layout.h"

#include <ATen/ops/empty.h>

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

// A run of a buffer's elements, as a tensor of its own. Units make several for each parameter and step: this takes a
// fifth of the time of two views by the dispatcher. Autograd does not know that they are views; nor should it.
at::Tensor run_of(const at::Tensor& buffer, int64_t begin, at::IntArrayRef sizes) {
  auto run = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(buffer.storage()), buffer.key_set(), buffer.dtype());
  run.unsafeGetTensorImpl()->set_storage_offset(buffer.storage_offset() + begin);
  run.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return run;
}

constexpr int64_t kAlign = 16;  // elements: wholes begin on a line of the cache, if these are floats

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
  layout.gathered_ = layout.shard_ * ranks;
  layout.gathered_offsets_ = layout.offsets_;
  for (int64_t r = 0; r < ranks; r++) layout.gather_runs_.push_back({{0, r * layout.shard_, layout.shard_}});
  layout.all_gradients_ = layout.gradient_runs(std::vector<char>(layout.parameters(), 1));
  return layout;
}

ShardLayout ShardLayout::per_parameter(std::vector<Extent> parameters, int64_t ranks) {
  ShardLayout layout(std::move(parameters), ranks);
  layout.flat_ = false;
  for (size_t i = 0; i < layout.extents_.size(); i++) {
    layout.offsets_.push_back(layout.shard_);
    layout.shard_ += layout.piece_numel(i);
  }
  layout.lay_out_gathered();
  layout.all_gradients_ = layout.gradient_runs(std::vector<char>(layout.parameters(), 1));
  return layout;
}

void ShardLayout::lay_out_gathered() {
  if (ranks_ == 1) {  // the shard itself
    gathered_ = shard_;
    gathered_offsets_ = offsets_;
    gather_runs_ = {{{0, 0, shard_}}};
    return;
  }
  for (size_t i = 0; i < extents_.size(); i++) {
    gathered_offsets_.push_back(gathered_);
    gathered_ += up_to_multiple(numel(extents_[i].sizes), kAlign);
    landing_offsets_.push_back(is_cut_by_rows(i) ? -1 : landing_);
    if (!is_cut_by_rows(i)) landing_ += ranks_ * piece_numel(i);
  }
  gather_runs_.resize(static_cast<size_t>(ranks_));
  for (int64_t r = 0; r < ranks_; r++) {
    auto& runs = gather_runs_[static_cast<size_t>(r)];
    for (size_t i = 0; i < extents_.size(); i++) {
      const int64_t longest = piece_numel(i), size = in_shard(i, r).size;
      if (is_cut_by_rows(i))
        runs.push_back({0, gathered_offsets_[i] + r * longest, size});
      else
        runs.push_back({1, landing_offsets_[i] + r * longest, size});
      if (size < longest) runs.push_back({comm::kPadding, 0, longest - size});
    }
  }
}

int64_t ShardLayout::piece_numel(size_t i) const {
  return numel(piece_sizes(i, 0));
}  // the first rank's is the longest

bool ShardLayout::is_cut_by_rows(size_t i) const {
  const auto& extent = extents_[i];
  return flat_ || ranks_ == 1 || numel({extent.sizes.begin(), extent.sizes.begin() + extent.dim}) == 1;
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

at::Tensor ShardLayout::whole(size_t i, const at::Tensor& gathered) const {
  return run_of(gathered, gathered_offsets_[i], extents_[i].sizes);
}

at::Tensor ShardLayout::piece(size_t i, int64_t rank, const at::Tensor& shard) const {
  return run_of(shard, in_shard(i, rank).begin, piece_sizes(i, rank));
}

at::Tensor ShardLayout::shard_around(size_t i, int64_t rank, const at::Tensor& piece) const {
  const auto begin = piece.storage_offset() - in_shard(i, rank).begin;
  const auto there = static_cast<int64_t>(piece.storage().nbytes() / piece.itemsize());
  if (!piece.is_contiguous() || begin < 0 || begin + shard_ > there) return {};
  return run_of(piece, -in_shard(i, rank).begin, {shard_});
}

at::Tensor ShardLayout::piece_in_order(size_t i, int64_t rank, const at::Tensor& ordered) const {
  const auto sizes = piece_sizes(i, rank);
  return ordered.narrow(0, rank * piece_numel(i), numel(sizes)).view(sizes);
}

void ShardLayout::leave_landing(const at::Tensor& landing, const at::Tensor& gathered) const {
  if (landing_ == 0) return;
  for (size_t i = 0; i < extents_.size(); i++) {
    if (landing_offsets_[i] < 0) continue;
    const auto ordered = landing.narrow(0, landing_offsets_[i], ranks_ * piece_numel(i));
    for (int64_t r = 0; r < ranks_; r++) {
      const auto part = in_parameter(i, r);
      whole(i, gathered).narrow(extents_[i].dim, part.begin, part.size).copy_(piece_in_order(i, r, ordered));
    }
  }
}

comm::Runs ShardLayout::gradient_runs(const std::vector<char>& came) const {
  const bool all = std::find(came.begin(), came.end(), 0) == came.end();
  if (all && !all_gradients_.empty()) return all_gradients_;
  comm::Runs runs(static_cast<size_t>(ranks_));
  for (int64_t r = 0; r < ranks_; r++) {
    auto& of_rank = runs[static_cast<size_t>(r)];
    int64_t filled = 0;
    const auto pad_to = [&](int64_t place) {
      if (place > filled) of_rank.push_back({comm::kPadding, 0, place - filled});
      filled = std::max(filled, place);
    };
    for (size_t i = 0; i < extents_.size(); i++) {
      const auto place = in_shard(i, r);
      if (!came[i] || place.size == 0) continue;
      pad_to(place.begin);
      of_rank.push_back({static_cast<int32_t>(i), flat_ ? in_parameter(i, r).begin : r * piece_numel(i), place.size});
      filled += place.size;
    }
    pad_to(shard_);
  }
  return runs;
}

at::Tensor ShardLayout::in_order(size_t i, const at::Tensor& gradient) const {
  if (is_cut_by_rows(i)) return gradient.contiguous();
  auto ordered = at::empty({ranks_ * piece_numel(i)}, gradient.options());
  for (int64_t r = 0; r < ranks_; r++) {
    const auto part = in_parameter(i, r);
    piece_in_order(i, r, ordered).copy_(gradient.narrow(extents_[i].dim, part.begin, part.size));
  }
  return ordered;
}

}  // namespace tessera::data_parallel::fsdp
