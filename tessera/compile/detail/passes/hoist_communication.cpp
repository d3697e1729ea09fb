#include "tessera/compile/detail/ir/dependencies.h"
#include "tessera/compile/detail/ir/op_table.h"
#include "tessera/compile/detail/passes/movable_with_collective.h"
#include "tessera/compile/detail/passes/passes.h"

namespace tessera::compiler {
// Collectives, and what is only there to feed them, go up to where their arguments are there. Their order among each
// other stays: it is the same on all ranks.
Matched hoist_communication(Program& program) {
  const Dependencies dependencies(program);
  const auto count = program.nodes.size();
  std::vector<char> early(count, 0);
  for (size_t n = count; n-- > 0;) {
    early[n] = kind_of(program.nodes[n]) == OpKind::Collective;
    if (early[n] || !is_on_the_way(program, program.nodes[n])) continue;
    for (const auto later : dependencies.after(n)) early[n] |= early[static_cast<size_t>(later)];
  }
  std::vector<int32_t> order;
  std::vector<char> placed(count, 0);
  const auto ready = [&](size_t n) {
    for (const auto earlier : dependencies.before(n))
      if (!placed[static_cast<size_t>(earlier)]) return false;
    return true;
  };
  const auto place = [&](size_t n) {
    placed[n] = 1;
    order.push_back(static_cast<int32_t>(n));
  };
  std::vector<size_t> waiting;  // early ones, in order
  for (size_t n = 0; n < count; n++)
    if (early[n]) waiting.push_back(n);
  const auto place_ready = [&] {
    for (bool any = true; any;) {
      any = false;
      for (auto& n : waiting) {
        if (placed[n] || !ready(n)) continue;
        place(n);
        any = true;
      }
      std::erase_if(waiting, [&](size_t n) { return placed[n]; });
    }
  };
  place_ready();
  for (size_t n = 0; n < count; n++) {
    if (early[n]) continue;
    place(n);
    place_ready();
  }
  Matched matched;
  for (size_t i = 0; i < count; i++) matched.times += order[i] != static_cast<int32_t>(i);
  reorder(program, order);
  return matched;
}

}  // namespace tessera::compiler
