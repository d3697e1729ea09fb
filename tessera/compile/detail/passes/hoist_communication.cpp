#include "tessera/compile/detail/ir/dependencies.h"
#include "tessera/compile/detail/ir/op_table.h"
#include "tessera/compile/detail/passes/movable_with_collective.h"
#include "tessera/compile/detail/passes/passes.h"

#include <algorithm>

// Overlap: posts each collective as soon as its inputs are ready. The views, casts and divisions that prepare its input
// move up with it.
//
//   %1 = aten.mm(%0, %0)                              %1 = aten.mm(%0, %0)
//   %2 = aten.exp(%0)                          ->     %3 = tessera.all_reduce(%1, "sum", @dp)
//   %3 = tessera.all_reduce(%1, "sum", @dp)           %2 = aten.exp(%0)
//
// Law: any order that respects the dependence graph is valid. Collectives keep their order among each other, so it
// stays equal on all ranks.
namespace tessera::compiler {

Matched hoist_communication(Program& program) {
  const auto& nodes = program.nodes;
  if (std::none_of(nodes.begin(), nodes.end(), [](const Node& node) { return kind_of(node) == OpKind::Collective; }))
    return {};
  const Dependencies dependencies(program);
  const auto count = program.nodes.size();
  std::vector<char> early(count, 0);  // by node: a collective, or an op that prepares one
  for (size_t n = count; n-- > 0;) {
    early[n] = kind_of(program.nodes[n]) == OpKind::Collective;
    if (early[n] || !can_move_with_collective(program, program.nodes[n])) continue;
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
  std::vector<size_t> waiting;  // early nodes that are not placed yet, in order
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
