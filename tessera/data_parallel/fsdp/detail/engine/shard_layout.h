#pragma once
#include "tessera/comm/detail/runs.h"

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <iosfwd>
#include <vector>

// Where the parameters of a unit lie: in a rank's shard, which is one piece of memory of equal length on every rank,
// and in the gathered buffer, where each parameter is whole.
//
//   flat            parameters end to end, cut into ranks equal lengths; the gathered buffer is all shards end to end
//                     |  w0  | w1 |      w2      |..|        -> rank 0: w0 w1'  rank 1: 'w1 w2'  ...
//   per parameter   each is cut along a dim of its own into ranks pieces, of which the last may be short or empty; a
//                   shard has a piece of each, and a piece comes to its place in the whole
//                     shards  | w0 w1 w2 | w0 w1 w2. |       -> gathered  | w0 w0 | w1 w1 | w2 w2 |
//
// A piece of a parameter that is cut along another dim than its first is no run of memory of the whole. Those are
// gathered into a second buffer, the landing, and copied from there.
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
  int64_t gathered_numel() const { return gathered_; }
  int64_t landing_numel() const { return landing_; }
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

  // A piece in the shard of `rank`.
  at::Tensor piece(size_t i, int64_t rank, const at::Tensor& shard) const;
  // The shard that a piece is of; undefined, if it cannot lie in one.
  at::Tensor shard_around(size_t i, int64_t rank, const at::Tensor& piece) const;
  // The parameter in the gathered buffer.
  at::Tensor whole(size_t i, const at::Tensor& gathered) const;

  // How shards are gathered: tensor 0 is the gathered buffer, tensor 1 the landing.
  const comm::Runs& gather_runs() const { return gather_runs_; }
  void leave_landing(const at::Tensor& landing, const at::Tensor& gathered) const;

  // How gradients are reduced into shards: tensor i is in_order(i, gradient of parameter i). Those that have not come
  // count as zeros.
  comm::Runs gradient_runs(const std::vector<char>& came) const;
  // As shards have it: rank after rank. The gradient itself if it lies like that, else a copy.
  at::Tensor in_order(size_t i, const at::Tensor& gradient) const;

 private:
  ShardLayout(std::vector<Extent> parameters, int64_t ranks) : extents_(std::move(parameters)), ranks_(ranks) {}
  std::vector<Extent> extents_;
  int64_t piece_numel(size_t i) const;  // the longest
  bool is_cut_by_rows(size_t i) const;  // pieces are runs of the whole
  at::Tensor piece_in_order(size_t i, int64_t rank, const at::Tensor& ordered) const;
  void lay_out_gathered();

  std::vector<int64_t> offsets_;  // flat: in the gathered buffer; else: in each shard
  std::vector<int64_t> gathered_offsets_;
  std::vector<int64_t> landing_offsets_;  // -1: does not land
  comm::Runs gather_runs_, all_gradients_;
  int64_t ranks_;
  int64_t shard_ = 0, gathered_ = 0, landing_ = 0;
  bool flat_ = true;
};

}  // namespace tessera::data_parallel::fsdp
