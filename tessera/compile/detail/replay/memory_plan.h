#pragma once
#include "tessera/compile/detail/ir/program.h"

#include <cstdint>
#include <iosfwd>
#include <vector>

namespace tessera::compiler {

// Where the buffers of a program lie in its arena: two that are in use at the same time do not overlap. Pure.
//
//   lifetimes   a ######            arena   | a | b  |
//               b    ########               |  c |            c lies where a lay
//               c         ######
struct MemoryPlan {
  static constexpr int64_t kElsewhere = -1;  // not in the arena: external, put out, or brought along by its op
  static constexpr int64_t kAlign = 64;      // as LibTorch's allocator: kernels take other paths, and round otherwise
  std::vector<int64_t> offsets;              // by buffer
  int64_t arena_bytes = 0;
  int64_t total_bytes = 0;  // of the buffers in it, if each had its own
};
std::ostream& operator<<(std::ostream& out, const MemoryPlan& plan);

// `elsewhere`: by buffer.
MemoryPlan plan_memory(const Program& program, const std::vector<char>& elsewhere);

}  // namespace tessera::compiler
