#include "tessera/comm/detail/segments.h"

#include "tessera/base/error.h"
#include "tessera/comm/detail/communicator_post.h"
#include "tessera/comm/detail/wire_op.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

// A backend that does not implement SegmentCollectives gets one buffer. The segments are copied into it before the
// collective, or out of it afterwards.
namespace tessera::comm {
namespace {

void check_segments(const char* what, const Tensors& tensors, const Segments& segments, const at::Tensor& small,
                    int64_t ranks) {
  TESSERA_CHECK(static_cast<int64_t>(segments.size()) == ranks, UsageError, what, ": segments for ", segments.size(),
                " ranks of ", ranks);
  for (const auto& t : tensors)
    TESSERA_CHECK(t.is_contiguous() && t.scalar_type() == small.scalar_type(), UsageError, what,
                  ": segments need contiguous tensors of ", small.scalar_type(), "; found one of ", t.scalar_type(),
                  ", sizes ", t.sizes(), ", strides ", t.strides());
  for (const auto& of_rank : segments) {
    int64_t total = 0;
    for (const auto& segment : of_rank) {
      total += segment.size;
      if (segment.tensor == kPaddingSegment) continue;
      const auto which = static_cast<size_t>(segment.tensor);
      TESSERA_CHECK(
          which < tensors.size() && segment.begin >= 0 && segment.begin + segment.size <= tensors[which].numel(),
          UsageError, what, ": a segment of elements ", segment.begin, " to ", segment.begin + segment.size,
          " of tensor ", segment.tensor, ", which does not exist");
    }
    TESSERA_CHECK(total == small.numel(), UsageError, what, ": the segments of a rank have ", total,
                  " elements, and its part has ", small.numel());
  }
}

// Calls f(memory of the segment, its range in the part of its rank) for all segments except padding.
template <class F>
void for_each_segment(const Tensors& tensors, const std::vector<BufferSegment>& segments, const at::Tensor& part, F f) {
  int64_t at = 0;
  for (const auto& segment : segments) {
    if (segment.tensor != kPaddingSegment && segment.size > 0)
      f(tensors[static_cast<size_t>(segment.tensor)].view({-1}).narrow(0, segment.begin, segment.size),
        part.narrow(0, at, segment.size));
    at += segment.size;
  }
}

// True if the segments are one tensor with the parts of the ranks in order. Every backend supports this.
bool is_one_tensor(const Tensors& tensors, const Segments& segments, int64_t part) {
  for (size_t r = 0; r < segments.size(); r++)
    if (!(segments[r] == std::vector<BufferSegment>{{0, static_cast<int64_t>(r) * part, part}})) return false;
  return tensors[0].numel() == static_cast<int64_t>(segments.size()) * part;
}

int64_t bytes_of_all(const at::Tensor& part, int64_t ranks) { return static_cast<int64_t>(part.nbytes()) * ranks; }

}  // namespace

Work all_gather_into_segments(const Group& group, const Tensors& outs, const Segments& segments, const at::Tensor& in,
                              PostOptions options) {
  const int64_t ranks = group->size();
  check_segments("all_gather_into_segments", outs, segments, in, ranks);
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  const auto part = in.contiguous().view({-1});
  const auto post = [&](const PostCall& call) {
    return post_on(*group, CommKind::AllGatherIntoTensor, options, bytes_of_all(in, ranks), in.scalar_type(), call);
  };
  if (auto* backend = dynamic_cast<SegmentCollectives*>(group->backend().get()); backend && ranks > 1)
    return post([&] { return backend->allgather_segments(outs, segments, part); });
  if (is_one_tensor(outs, segments, in.numel())) {
    at::Tensor out = outs[0];
    return group->all_gather_into_tensor(out, part, options);
  }
  at::Tensor wire_in = part, wire_out = at::empty({ranks * in.numel()}, in.options());
  Work work = post([&] { return group->backend()->_allgather_base(wire_out, wire_in, c10d::AllgatherOptions()); });
  work.then([outs, segments, parts = wire_out.view({ranks, -1})] {
    for (size_t r = 0; r < segments.size(); r++)
      for_each_segment(outs, segments[r], parts[static_cast<int64_t>(r)],
                       [](const at::Tensor& segment, const at::Tensor& part) { segment.copy_(part); });
  });
  return work;
}

Work reduce_scatter_segments(const Group& group, const at::Tensor& out, const Tensors& ins, const Segments& segments,
                             ReduceOp op, PostOptions options) {
  const int64_t ranks = group->size();
  check_segments("reduce_scatter_segments", ins, segments, out, ranks);
  TESSERA_CHECK(out.is_contiguous() && op != ReduceOp::Avg, UsageError, "reduce_scatter_segments: the output of sizes ",
                out.sizes(), " must be contiguous, and avg is not supported; divide the sum instead");
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  c10d::ReduceScatterOptions c10d_options;
  c10d_options.reduceOp = detail::wire_op(op, out.scalar_type(), ranks);
  const auto post = [&](const PostCall& call) {
    return post_on(*group, CommKind::ReduceScatterTensor, options, bytes_of_all(out, ranks), out.scalar_type(), call);
  };
  if (auto* backend = dynamic_cast<SegmentCollectives*>(group->backend().get()); backend && ranks > 1)
    return post([&] { return backend->reduce_scatter_segments(out, ins, segments, c10d_options); });
  at::Tensor wire_in = at::zeros({ranks * out.numel()}, out.options()), wire_out = out.view({-1});
  const auto parts = wire_in.view({ranks, -1});
  for (size_t r = 0; r < segments.size(); r++)
    for_each_segment(ins, segments[r], parts[static_cast<int64_t>(r)],
                     [](const at::Tensor& segment, const at::Tensor& part) { part.copy_(segment); });
  return post([&] { return group->backend()->_reduce_scatter_base(wire_out, wire_in, c10d_options); });
}

}  // namespace tessera::comm
