#pragma once
#include "tessera/comm/detail/segments.h"

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <iosfwd>
#include <vector>

// Where the parameters of a group are stored: in a rank's shard, one buffer of equal length on every rank, and in the
// gathered buffer, which has every unsharded parameter.
//
//   flat            Parameters are concatenated and split into equal lengths, one per rank. The gathered buffer is the
//                   concatenation of all shards.
//                     |  w0  | w1 |      w2      |..|        -> rank 0: w0 w1'  rank 1: 'w1 w2'  ...
//   per parameter   Each parameter is sharded along its own dim. The last shards may be short or empty. A rank's buffer
//                   has its shard of each parameter.
//                     shards  | w0 w1 w2 | w0 w1 w2. |       -> gathered  | w0 w0 | w1 w1 | w2 w2 |
//
// If a parameter is sharded along a dim other than its first, its shards are not contiguous in the unsharded parameter.
// Such shards are gathered into a second buffer, the staging buffer, and copied from there.
//
// Counts are in elements. No communication.
namespace tessera::data_parallel::fsdp {

struct ParamShape {
  std::vector<int64_t> sizes;  // of the unsharded parameter on this rank
  int64_t dim = 0;             // per-parameter layout: the sharded dim
};

// A range of elements or indices.
struct ShardRange {
  int64_t begin = 0, size = 0;
  bool operator==(const ShardRange&) const = default;
};
std::ostream& operator<<(std::ostream& out, const ShardRange& range);  // [begin, end)

class ShardLayout {
 public:
  // Each parameter begins at a multiple of `align` elements.
  static ShardLayout flat(std::vector<ParamShape> parameters, int64_t ranks, int64_t align = 1);
  static ShardLayout per_parameter(std::vector<ParamShape> parameters, int64_t ranks);

  bool is_flat() const { return flat_; }
  int64_t ranks() const { return ranks_; }
  int64_t shard_numel() const { return shard_numel_; }
  int64_t gathered_numel() const { return gathered_numel_; }
  int64_t staging_numel() const { return staging_numel_; }
  int64_t dim(size_t i) const { return shapes_[i].dim; }
  size_t num_params() const { return shapes_.size(); }
  const std::vector<int64_t>& sizes(size_t i) const { return shapes_[i].sizes; }

  // Where parameter i is in the shard of `rank`; empty if that shard has no element of it.
  ShardRange range_in_shard(size_t i, int64_t rank) const;
  // The shape of that part. In a flat layout with several ranks it is 1-D.
  std::vector<int64_t> param_shard_sizes(size_t i, int64_t rank) const;
  // Which part of parameter i it is: a range of elements (flat layout) or of indices along dim (per parameter).
  ShardRange range_in_param(size_t i, int64_t rank) const;

  // The part of an unsharded parameter that belongs to `rank`; a view where possible.
  at::Tensor shard_of(size_t i, const at::Tensor& unsharded, int64_t rank) const;
  // Copies that part to its place in the shard of `rank`, or in a buffer of that layout (gradient, optimizer state).
  void copy_to_shard(size_t i, const at::Tensor& unsharded, int64_t rank, const at::Tensor& shard) const;

  // A view of parameter i in the shard of `rank`.
  at::Tensor param_in_shard(size_t i, int64_t rank, const at::Tensor& shard) const;
  // The inverse: the shard of which `param_shard` is a view. Undefined if it cannot be a view of one.
  at::Tensor enclosing_shard(size_t i, int64_t rank, const at::Tensor& param_shard) const;
  // A view of parameter i in the gathered buffer.
  at::Tensor unsharded_param(size_t i, const at::Tensor& gathered) const;

  // Segments for the all-gather: tensor 0 is the gathered buffer, tensor 1 the staging buffer.
  const comm::Segments& gather_segments() const { return gather_segments_; }
  void copy_from_staging(const at::Tensor& staging, const at::Tensor& gathered) const;

  // Segments for the reduce-scatter: tensor i is in_shard_order(i, gradient of parameter i). A gradient that is not
  // ready counts as zeros.
  comm::Segments gradient_segments(const std::vector<char>& ready) const;
  // The gradient with the shards of all ranks one after the other. The gradient itself if it is stored so, else a copy.
  at::Tensor in_shard_order(size_t i, const at::Tensor& gradient) const;
  // The part of in_shard_order(i, gradient) that belongs to `rank`, as a view.
  at::Tensor shard_of_ordered(size_t i, const at::Tensor& ordered, int64_t rank) const;

 private:
  ShardLayout(std::vector<ParamShape> parameters, int64_t ranks) : shapes_(std::move(parameters)), ranks_(ranks) {}
  int64_t max_param_shard_numel(size_t i) const;  // over ranks
  bool has_contiguous_shards(size_t i) const;     // shards are contiguous in the unsharded parameter
  at::Tensor param_shard_in_order(size_t i, int64_t rank, const at::Tensor& ordered) const;
  void set_gathered_layout();

  std::vector<ParamShape> shapes_;
  std::vector<int64_t> offsets_;  // flat: in the gathered buffer; per parameter: in each shard
  std::vector<int64_t> gathered_offsets_;
  std::vector<int64_t> staging_offsets_;  // -1: not staged
  comm::Segments gather_segments_, all_gradients_;
  int64_t ranks_;
  int64_t shard_numel_ = 0, gathered_numel_ = 0, staging_numel_ = 0;
  bool flat_ = true;
};

}  // namespace tessera::data_parallel::fsdp
