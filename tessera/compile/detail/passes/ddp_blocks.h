#pragma once
#include "tessera/compile/detail/ir/program.h"

#include <vector>

namespace tessera::compiler {

// A gradient's way through the per-parameter reducer, as found in a program:
//
//   %2 = aten.div.Tensor(%1, 2)         divided
//   %3 = tessera.all_reduce(%2, ...)    posted
//   %4 in %3 = tessera.wait(%3!, ...)
//   ... one reader: the gradient that is put out, or a copy into the one that was there
struct CommBlock {
  size_t divide, reduce, wait;  // nodes
  ValueId gradient;             // before it is divided
  ValueId divided, reduced;     // what div, all_reduce and
  ValueId waited;               // wait give
  int32_t copied_to;            // the buffer that the result is copied into; -1: it is put out
  double divisor;
  int32_t group;
  int64_t bytes;
};
std::vector<CommBlock> find_comm_blocks(const Program& program);

// By PyTorch's rule: in order, the first bucket closes at 1 MiB and the others at `cap`, each with the block that
// takes it there. Blocks of another dtype, group or divisor begin a new one, and so does one before
// which something writes to a gradient of the bucket: gradients are read where the last of them is there.
inline constexpr int64_t kFirstBucketBytes = 1024 * 1024;
inline constexpr int64_t kBucketBytes = 25 * 1024 * 1024;
std::vector<std::vector<CommBlock>> bucket_blocks(const Program& program, const std::vector<CommBlock>& blocks,
                                                  int64_t cap = kBucketBytes);

}  // namespace tessera::compiler
