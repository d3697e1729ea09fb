#include "tessera/compile/detail/report/memory_curve.h"

#include "tessera/compile/detail/ir/dependencies.h"

#include <algorithm>

namespace tessera::compiler {

int64_t MemoryCurve::peak() const { return own.empty() ? 0 : *std::max_element(own.begin(), own.end()); }

MemoryCurve memory_curve(const Program& program, const MemoryPlan* plan) {
  const auto nodes = program.nodes.size();
  MemoryCurve curve{std::vector<int64_t>(nodes, 0), std::vector<int64_t>(nodes, 0)};
  const auto external = program.external_buffers();
  const auto bytes = program.buffer_bytes();
  auto alive = lifetimes(program);
  for (const auto& output : program.outputs)
    if (output.value != kNone) {
      auto& lifetime = alive[static_cast<size_t>(program.buffer_of(output.value))];
      if (lifetime.first >= 0) lifetime.last = static_cast<int32_t>(nodes) - 1;
    }
  for (size_t b = 0; b < alive.size(); b++) {
    if (external[b] || alive[b].first < 0) continue;
    const bool in_arena = plan && plan->offsets[b] != MemoryPlan::kOutside;
    for (auto n = static_cast<size_t>(alive[b].first); n <= static_cast<size_t>(alive[b].last); n++) {
      curve.own[n] += bytes[b];
      if (in_arena) curve.arena[n] += bytes[b];
    }
  }
  return curve;
}

}  // namespace tessera::compiler
