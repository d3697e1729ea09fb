#include "tessera/compile/detail/report/memory_curve.h"

#include "tessera/compile/detail/ir/dependencies.h"

#include <algorithm>
#include <numeric>

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
  const auto add = [&](std::vector<int64_t>& changes, size_t b) {  // from one node to the next
    changes[static_cast<size_t>(alive[b].first)] += bytes[b];
    if (const auto end = static_cast<size_t>(alive[b].last) + 1; end < nodes) changes[end] -= bytes[b];
  };
  for (size_t b = 0; b < alive.size(); b++) {
    if (external[b] || alive[b].first < 0) continue;
    add(curve.own, b);
    if (plan && plan->offsets[b] != MemoryPlan::kOutside) add(curve.arena, b);
  }
  for (auto* sums : {&curve.own, &curve.arena}) std::partial_sum(sums->begin(), sums->end(), sums->begin());
  return curve;
}

}  // namespace tessera::compiler
