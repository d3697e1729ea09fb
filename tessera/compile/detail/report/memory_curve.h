#pragma once
#include "tessera/compile/detail/replay/memory_plan.h"

#include <vector>

namespace tessera::compiler {

// The bytes of live buffers at each node. Outputs stay alive to the end. External memory is not counted.
struct MemoryCurve {
  std::vector<int64_t> own;    // by node: buffers that the program allocates
  std::vector<int64_t> arena;  // by node: the part of `own` in the arena
  int64_t peak() const;        // of `own`
};
// `plan` is null if memory is not planned yet.
MemoryCurve memory_curve(const Program& program, const MemoryPlan* plan = nullptr);

}  // namespace tessera::compiler
