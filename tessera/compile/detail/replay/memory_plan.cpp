#include "tessera/compile/detail/replay/memory_plan.h"

#include "tessera/compile/detail/ir/dependencies.h"

#include <algorithm>
#include <numeric>
#include <ostream>

namespace tessera::compiler {
namespace {

// As LibTorch's allocators: unaligned, a kernel may round differently.
int64_t alignment_on(c10::Device device) { return device.is_cpu() ? 64 : 512; }

int64_t align_up(int64_t bytes, int64_t alignment) {
  return std::max<int64_t>((bytes + alignment - 1) / alignment, 1) * alignment;
}

struct PlacedBuffer {
  c10::Device device;
  Lifetime lifetime;
  int64_t begin, end;
};

}  // namespace

MemoryPlan::Arena& MemoryPlan::arena(c10::Device device) {
  const auto found =
      std::find_if(arenas.begin(), arenas.end(), [&](const Arena& each) { return each.device == device; });
  return found != arenas.end() ? *found : arenas.emplace_back(Arena{device});
}

std::ostream& operator<<(std::ostream& out, const MemoryPlan& plan) {
  return out << plan.arena_bytes << " bytes for buffers of " << plan.total_bytes;
}

// Places the largest buffer first, each at the lowest offset that fits.
MemoryPlan plan_memory(const Program& program, const std::vector<char>& outside) {
  MemoryPlan plan;
  const auto bytes = program.buffer_bytes();
  auto alive = lifetimes(program);
  for (const auto& output : program.outputs)  // the caller reads it after the last node
    if (output.value != kNone)
      alive[static_cast<size_t>(program.buffer_of(output.value))].last = static_cast<int32_t>(program.nodes.size());
  plan.offsets.assign(bytes.size(), MemoryPlan::kOutside);
  std::vector<c10::Device> devices(bytes.size(), c10::kCPU);
  for (const auto& value : program.values) devices[static_cast<size_t>(value.buffer)] = value.type.device;
  std::vector<size_t> order(bytes.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return bytes[a] > bytes[b]; });
  std::vector<PlacedBuffer> placed;  // ordered by begin
  for (const auto b : order) {
    if (outside[b] || alive[b].first < 0) continue;
    const auto size = align_up(bytes[b], alignment_on(devices[b]));
    int64_t begin = 0;
    for (const auto& other : placed) {
      const bool alive_together = other.lifetime.first <= alive[b].last && alive[b].first <= other.lifetime.last;
      if (!alive_together || other.device != devices[b]) continue;
      if (other.begin >= begin + size) break;
      begin = std::max(begin, other.end);
    }
    plan.offsets[b] = begin;
    auto& arena = plan.arena(devices[b]);
    arena.bytes = std::max(arena.bytes, begin + size);
    plan.total_bytes += size;
    const PlacedBuffer here{devices[b], alive[b], begin, begin + size};
    placed.insert(std::upper_bound(placed.begin(), placed.end(), here,
                                   [](const PlacedBuffer& x, const PlacedBuffer& y) { return x.begin < y.begin; }),
                  here);
  }
  for (const auto& arena : plan.arenas) plan.arena_bytes += arena.bytes;
  return plan;
}

}  // namespace tessera::compiler
