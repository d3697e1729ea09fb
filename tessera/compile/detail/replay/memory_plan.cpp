#include "tessera/compile/detail/replay/memory_plan.h"

#include "tessera/compile/detail/ir/dependencies.h"

#include <algorithm>
#include <numeric>
#include <ostream>

namespace tessera::compiler {
namespace {

int64_t aligned(int64_t bytes) { return (bytes + MemoryPlan::kAlign - 1) / MemoryPlan::kAlign * MemoryPlan::kAlign; }

struct Placed {
  Lifetime lifetime;
  int64_t begin, end;
};

}  // namespace

std::ostream& operator<<(std::ostream& out, const MemoryPlan& plan) {
  return out << plan.arena_bytes << " bytes for buffers of " << plan.total_bytes;
}

// The largest first, each as low as it fits.
MemoryPlan plan_memory(const Program& program, const std::vector<char>& elsewhere) {
  MemoryPlan plan;
  const auto bytes = program.buffer_bytes();
  const auto alive = lifetimes(program);
  plan.offsets.assign(bytes.size(), MemoryPlan::kElsewhere);
  std::vector<size_t> order(bytes.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return bytes[a] > bytes[b]; });
  std::vector<Placed> placed;  // by begin
  for (const auto b : order) {
    if (elsewhere[b] || alive[b].first < 0) continue;
    const auto size = std::max<int64_t>(aligned(bytes[b]), MemoryPlan::kAlign);
    int64_t begin = 0;
    for (const auto& other : placed) {
      const bool together = other.lifetime.first <= alive[b].last && alive[b].first <= other.lifetime.last;
      if (!together) continue;
      if (other.begin >= begin + size) break;
      begin = std::max(begin, other.end);
    }
    plan.offsets[b] = begin;
    plan.arena_bytes = std::max(plan.arena_bytes, begin + size);
    plan.total_bytes += size;
    const Placed here{alive[b], begin, begin + size};
    placed.insert(std::upper_bound(placed.begin(), placed.end(), here,
                                   [](const Placed& x, const Placed& y) { return x.begin < y.begin; }),
                  here);
  }
  return plan;
}

}  // namespace tessera::compiler
