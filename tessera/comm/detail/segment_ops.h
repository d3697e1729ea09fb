#pragma once
#include "tessera/base/reduce_op.h"
#include "tessera/comm/detail/segments.h"

// The collectives of segments.h with results that are pending until funcol::wait(x, group), as in inplace_ops.h. Inside
// a step that is being compiled they are registered ops, so that the program contains them. Elsewhere they are plain
// calls.
namespace tessera::comm {

// All `outs` are pending.
// tessera::all_gather_into_segments_(Tensor(a!)[] outs, Tensor part, int[] segments, str label, Group group) -> ()
void all_gather_into_segments_(const std::vector<at::Tensor>& outs, const at::Tensor& part, const Segments& segments,
                               const Group& group);

// tessera::reduce_scatter_segments_into_(Tensor(a!) out, Tensor[] ins, int[] segments, str op, str label, Group group)
//     -> Tensor(a!)
void reduce_scatter_segments_into_(const at::Tensor& out, const std::vector<at::Tensor>& ins, const Segments& segments,
                                   ReduceOp op, const Group& group);

// Segments as the int[] argument of an op: for each rank the number of segments, then tensor, begin and size of each.
//   {{{0, 0, 8}}, {{0, 8, 6}, {kPaddingSegment, 0, 2}}}   ->   1  0 0 8   2  0 8 6  -1 0 2
std::vector<int64_t> segments_to_ints(const Segments& segments);
Segments segments_from_ints(at::IntArrayRef ints);  // throws UsageError if the list is malformed

}  // namespace tessera::comm
