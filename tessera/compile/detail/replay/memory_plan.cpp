#include "tessera/compile/detail/replay/memory_plan.h"

#include "tessera/compile/detail/ir/dependencies.h"

#include <algorithm>
#include <functional>
#include <map>
#include <optional>
#include <ostream>
#include <utility>

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

namespace {

// Places the buffers in this order, each at the lowest offset that fits.
MemoryPlan place_buffers(const std::vector<size_t>& order, const std::vector<int64_t>& bytes,
                         const std::vector<Lifetime>& alive, const std::vector<c10::Device>& devices) {
  MemoryPlan plan;
  plan.offsets.assign(bytes.size(), MemoryPlan::kOutside);
  std::vector<PlacedBuffer> placed;  // ordered by begin
  for (const auto b : order) {
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

}  // namespace

namespace {

// The node at which the buffers need the most memory.
int32_t peak_node(const std::vector<size_t>& buffers, const std::vector<int64_t>& bytes,
                  const std::vector<Lifetime>& alive) {
  std::map<int32_t, int64_t> change;
  for (const auto b : buffers) change[alive[b].first] += bytes[b], change[alive[b].last + 1] -= bytes[b];
  int64_t now = 0, most = 0;
  int32_t peak = 0;
  for (const auto& [node, by] : change)
    if ((now += by) > most) most = now, peak = node;
  return peak;
}

}  // namespace

// Tries several orders: the largest buffers first, the longest lived first, both together, and those at the peak of
// memory before those far from it. Fragments differ.
MemoryPlan plan_memory(const Program& program, const std::vector<char>& outside) {
  const auto bytes = program.buffer_bytes();
  auto alive = lifetimes(program);
  for (const auto& output : program.outputs)  // the caller reads it after the last node
    if (output.value != kNone)
      alive[static_cast<size_t>(program.buffer_of(output.value))].last = static_cast<int32_t>(program.nodes.size());
  std::vector<c10::Device> devices(bytes.size(), c10::kCPU);
  for (const auto& value : program.values) devices[static_cast<size_t>(value.buffer)] = value.type.device;
  std::vector<size_t> used;
  for (size_t b = 0; b < bytes.size(); b++)
    if (!outside[b] && alive[b].first >= 0) used.push_back(b);
  const auto nodes_of = [&](size_t b) { return static_cast<double>(alive[b].last - alive[b].first + 1); };
  const auto bytes_of = [&](size_t b) { return static_cast<double>(bytes[b]); };
  const auto peak = peak_node(used, bytes, alive);
  const auto from_peak = [&](size_t b) { return std::max({0, alive[b].first - peak, peak - alive[b].last}); };
  using Key = std::pair<double, double>;
  const std::function<Key(size_t)> keys[] = {[&](size_t b) { return Key(bytes_of(b), 0); },
                                             [&](size_t b) { return Key(nodes_of(b), 0); },
                                             [&](size_t b) { return Key(bytes_of(b) * nodes_of(b), 0); },
                                             [&](size_t b) { return Key(-static_cast<double>(alive[b].first), 0); },
                                             [&](size_t b) { return Key(-from_peak(b), bytes_of(b)); }};
  std::optional<MemoryPlan> best;
  for (const auto& key : keys) {
    auto order = used;
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return key(a) > key(b); });
    auto plan = place_buffers(order, bytes, alive, devices);
    if (!best || plan.arena_bytes < best->arena_bytes) best = std::move(plan);
  }
  return *best;
}

}  // namespace tessera::compiler
