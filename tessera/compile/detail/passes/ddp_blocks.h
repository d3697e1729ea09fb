#pragma once
#include "tessera/compile/detail/ir/program.h"

#include <vector>

namespace tessera::compiler {

// The nodes that average one gradient over ranks, as per-parameter data parallelism records them (PyTorch Inductor:
// CommBlock):
//
//   %2 = aten.div.Tensor(%1, 2)
//   %3 = tessera.all_reduce(%2, ...)
//   %4 in %3 = tessera.wait(%3!, ...)
//   ... %4 has one use: it is an output, or it is copied into an existing gradient
struct CommBlock {
  size_t divide, reduce, wait;  // nodes
  ValueId gradient;             // before the division
  ValueId divided, reduced;     // results of div and all_reduce
  ValueId waited;               // result of wait
  int32_t copied_to;            // the buffer that the result is copied into; -1: it is an output
  double divisor;
  int32_t group;
  int64_t bytes;
};
std::vector<CommBlock> find_comm_blocks(const Program& program);

// Buckets by the rule of PyTorch's DDP: blocks in order; the first bucket closes when it reaches 1 MiB, the others at
// `cap`. A block of another dtype, group or divisor starts a new bucket. So does a block if an op before it writes to a
// gradient of the bucket, because all gradients of a bucket are read at its last block.
inline constexpr int64_t kFirstBucketBytes = 1024 * 1024;
inline constexpr int64_t kBucketBytes = 25 * 1024 * 1024;
std::vector<std::vector<CommBlock>> bucket_blocks(const Program& program, const std::vector<CommBlock>& blocks,
                                                  int64_t cap = kBucketBytes);

}  // namespace tessera::compiler
