#pragma once
#include "tessera/compile/detail/replay/memory_plan.h"

#include <vector>

namespace tessera::compiler {

// Bytes that are in use while each node runs, by node. What is put out stays in use to the end; memory from outside
// does not count.
struct MemoryCurve {
  std::vector<int64_t> own;    // what the program makes
  std::vector<int64_t> arena;  // of it, what lies in the arena
  int64_t peak() const;        // of own
};
// `plan` null: there is no arena yet.
MemoryCurve memory_curve(const Program& program, const MemoryPlan* plan = nullptr);

}  // namespace tessera::compiler
