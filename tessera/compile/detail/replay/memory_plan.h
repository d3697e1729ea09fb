#pragma once
#include "tessera/compile/detail/ir/program.h"

#include <cstdint>
#include <iosfwd>
#include <vector>

namespace tessera::compiler {

// The offsets of a program's temporary buffers in one arena. Buffers with overlapping lifetimes do not overlap in
// memory.
//
//   lifetimes   a ######            arena   | a | b  |
//               b    ########               |  c |            c reuses the memory of a
//               c         ######
struct MemoryPlan {
  static constexpr int64_t kOutside = -1;  // not in the arena: an input, an output, or allocated by its op
  static constexpr int64_t kAlign = 64;    // as LibTorch's allocator: unaligned, a kernel may round differently
  std::vector<int64_t> offsets;            // by buffer
  int64_t arena_bytes = 0;
  int64_t total_bytes = 0;  // sum of the sizes of the buffers in the arena
};
std::ostream& operator<<(std::ostream& out, const MemoryPlan& plan);

// `outside`: by buffer, whether it stays out of the arena.
MemoryPlan plan_memory(const Program& program, const std::vector<char>& outside);

}  // namespace tessera::compiler
