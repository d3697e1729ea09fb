#include "tessera/compile/detail/replay/memory_plan.h"

#include "tessera/compile/detail/ir/dependencies.h"

#include <algorithm>
#include <numeric>
#include <ostream>

namespace tessera::compiler {
namespace {

int64_t align_up(int64_t bytes) { return (bytes + MemoryPlan::kAlign - 1) / MemoryPlan::kAlign * MemoryPlan::kAlign; }

struct PlacedBuffer {
  Lifetime lifetime;
  int64_t begin, end;
};

}  // namespace

std::ostream& operator<<(std::ostream& out, const MemoryPlan& plan) {
  return out << plan.arena_bytes << " bytes for buffers of " << plan.total_bytes;
}

// Places the largest buffer first, each at the lowest offset that fits.
MemoryPlan plan_memory(const Program& program, const std::vector<char>& outside) {
  MemoryPlan plan;
  const auto bytes = program.buffer_bytes();
  const auto alive = lifetimes(program);
  plan.offsets.assign(bytes.size(), MemoryPlan::kOutside);
  std::vector<size_t> order(bytes.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return bytes[a] > bytes[b]; });
  std::vector<PlacedBuffer> placed;  // ordered by begin
  for (const auto b : order) {
    if (outside[b] || alive[b].first < 0) continue;
    const auto size = std::max<int64_t>(align_up(bytes[b]), MemoryPlan::kAlign);
    int64_t begin = 0;
    for (const auto& other : placed) {
      const bool alive_together = other.lifetime.first <= alive[b].last && alive[b].first <= other.lifetime.last;
      if (!alive_together) continue;
      if (other.begin >= begin + size) break;
      begin = std::max(begin, other.end);
    }
    plan.offsets[b] = begin;
    plan.arena_bytes = std::max(plan.arena_bytes, begin + size);
    plan.total_bytes += size;
    const PlacedBuffer here{alive[b], begin, begin + size};
    placed.insert(std::upper_bound(placed.begin(), placed.end(), here,
                                   [](const PlacedBuffer& x, const PlacedBuffer& y) { return x.begin < y.begin; }),
                  here);
  }
  return plan;
}

}  // namespace tessera::compiler
