#pragma once
#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <iosfwd>
#include <vector>

// Where the parameters of a unit lie: in a rank's shard, which is one piece of memory of equal length on every rank,
// and in the gathered buffer, which is all shards one after the other.
//
//   flat            parameters end to end, cut into ranks equal lengths; the gathered buffer is the parameters
//                     |  w0  | w1 |      w2      |..|        -> rank 0: w0 w1'  rank 1: 'w1 w2'  ...
//   per parameter   each is cut along a dim of its own into ranks pieces, of which the last may be short or empty; a
//                   shard has a piece of each
//                     | w0 w1 w2 | w0 w1 w2. |
//
// Counts are in elements. Pure.
namespace tessera::data_parallel::fsdp {

struct Extent {
  std::vector<int64_t> sizes;  // of the parameter when whole, as this rank computes with it
  int64_t dim = 0;             // per parameter: which to cut along
};

// A run of elements.
struct Part {
  int64_t begin = 0, size = 0;
  bool operator==(const Part&) const = default;
};
std::ostream& operator<<(std::ostream& out, const Part& part);

class ShardLayout {
 public:
  // Each parameter begins at a multiple of `align` elements.
  static ShardLayout flat(std::vector<Extent> parameters, int64_t ranks, int64_t align = 1);
  static ShardLayout per_parameter(std::vector<Extent> parameters, int64_t ranks);

  bool is_flat() const { return flat_; }
  int64_t ranks() const { return ranks_; }
  int64_t shard_numel() const { return shard_; }
  int64_t gathered_numel() const { return shard_ * ranks_; }
  int64_t numel_of_all() const;  // parameters, without padding
  int64_t dim(size_t i) const { return extents_[i].dim; }
  size_t parameters() const { return extents_.size(); }
  const std::vector<int64_t>& sizes(size_t i) const { return extents_[i].sizes; }

  // Of parameter i, in the shard of `rank`; empty if that has none of it.
  Part in_shard(size_t i, int64_t rank) const;
  // The shape of that piece: one dim in a flat layout of several ranks.
  std::vector<int64_t> piece_sizes(size_t i, int64_t rank) const;
  // Which part of parameter i it is: a run of its elements in a flat layout, else of its indices along dim.
  Part in_parameter(size_t i, int64_t rank) const;

  // That piece of a whole parameter: a view where it can be one.
  at::Tensor cut(size_t i, const at::Tensor& whole, int64_t rank) const;
  // Writes it to where the shard of `rank` (or a tensor like it: a gradient, a row of an optimizer) has it.
  void put(size_t i, const at::Tensor& whole, int64_t rank, const at::Tensor& shard) const;

  bool has_padding() const { return padded_; }  // elements of the gathered buffer that belong to no parameter

  // Writes the parameter's values, times `scale`, to where `gathered` (or a buffer of gradients like it) has them; or
  // adds them there.
  void scatter(size_t i, const at::Tensor& whole, const at::Tensor& gathered, double scale = 1, bool add = false) const;
  // The parameter as it lies in `gathered`: a view where it lies in one piece, else a copy.
  at::Tensor assemble(size_t i, const at::Tensor& gathered) const;

 private:
  ShardLayout(std::vector<Extent> parameters, int64_t ranks) : extents_(std::move(parameters)), ranks_(ranks) {}
  std::vector<Extent> extents_;
  std::vector<int64_t> offsets_;  // flat: in the gathered buffer; else: in each shard
  int64_t ranks_;
  int64_t shard_ = 0;
  bool flat_ = true;
  bool padded_ = false;
};

}  // namespace tessera::data_parallel::fsdp
