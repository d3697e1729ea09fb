#pragma once
#include "tessera/comm/communicator.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace c10d {
class Work;
struct ReduceScatterOptions;
}  // namespace c10d

// all_gather and reduce_scatter whose large side is not one tensor, but segments of several tensors. FSDP uses them to
// gather into parameters, and to reduce from gradients, without a copy. Each rank has a list of segments:
//
//   tensors   0: weight of 4 rows   1: bias of 4      two ranks; a shard has half of each
//   segments  {{{0, 0, 2 rows}, {1, 0, 2}},           the shard of rank 0
//              {{0, 2 rows, 2 rows}, {1, 2, 2}}}      the shard of rank 1
namespace tessera::comm {

struct BufferSegment {
  int32_t tensor = 0;           // index of the tensor; kPaddingSegment: no tensor
  int64_t begin = 0, size = 0;  // elements, in memory order
  bool operator==(const BufferSegment&) const = default;
};
constexpr int32_t kPaddingSegment = -1;  // is read as zeros and never written

using Segments = std::vector<std::vector<BufferSegment>>;  // by rank; all ranks have the same number of elements

// One collective each, recorded as all_gather_into_tensor and reduce_scatter_tensor. The tensors must be contiguous.
Work all_gather_into_segments(const Group& group, const std::vector<at::Tensor>& outs, const Segments& segments,
                              const at::Tensor& in, PostOptions options = {});
// ReduceOp::Avg is not supported, because it would need one more pass over all inputs: divide the output instead.
Work reduce_scatter_segments(const Group& group, const at::Tensor& out, const std::vector<at::Tensor>& ins,
                             const Segments& segments, ReduceOp op, PostOptions options = {});

// Implemented by a c10d::Backend that can read and write segments directly, in a group of several ranks.
// Other backends get a copy in one buffer.
struct SegmentCollectives {
  virtual ~SegmentCollectives() = default;
  virtual c10::intrusive_ptr<c10d::Work> allgather_segments(const std::vector<at::Tensor>& outs,
                                                            const Segments& segments, const at::Tensor& in) = 0;
  virtual c10::intrusive_ptr<c10d::Work> reduce_scatter_segments(const at::Tensor& out,
                                                                 const std::vector<at::Tensor>& ins,
                                                                 const Segments& segments,
                                                                 const c10d::ReduceScatterOptions& options) = 0;
};

}  // namespace tessera::comm
