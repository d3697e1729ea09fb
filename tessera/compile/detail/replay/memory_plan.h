#pragma once
#include "tessera/compile/detail/ir/program.h"

#include <cstdint>
#include <iosfwd>
#include <vector>

namespace tessera::compiler {

// The offsets of a program's temporary buffers in one arena per device. Buffers with overlapping lifetimes do not
// overlap in memory.
//
//   lifetimes   a ######            arena   | a | b  |
//               b    ########               |  c |            c reuses the memory of a
//               c         ######
struct MemoryPlan {
  static constexpr int64_t kOutside = -1;  // not in the arena: an input, an output, or allocated by its op
  struct Arena {
    c10::Device device;
    int64_t bytes = 0;
  };
  std::vector<int64_t> offsets;  // by buffer, in the arena of its device
  std::vector<Arena> arenas;     // one per device
  int64_t arena_bytes = 0;       // of all arenas
  int64_t total_bytes = 0;       // sum of the sizes of the buffers in the arenas

  Arena& arena(c10::Device device);
};
std::ostream& operator<<(std::ostream& out, const MemoryPlan& plan);

// `outside`: by buffer, whether it stays out of the arena.
MemoryPlan plan_memory(const Program& program, const std::vector<char>& outside);

}  // namespace tessera::compiler
