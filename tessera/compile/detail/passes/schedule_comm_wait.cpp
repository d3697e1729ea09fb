#include "tessera/compile/detail/ir/dependencies.h"
#include "tessera/compile/detail/ir/op_table.h"
#include "tessera/compile/detail/passes/passes.h"

#include <algorithm>

// Overlap: delays each wait, with the views and copies of its result, to right before the first node that needs it.
// Waits whose result nothing uses move to the end.
//
//   %2 = tessera.all_reduce(%1, ...)             %2 = tessera.all_reduce(%1, ...)
//   %3 in %2 = tessera.wait(%2!, @dp)      ->    %4 = aten.exp(%0)
//   %4 = aten.exp(%0)                            %3 in %2 = tessera.wait(%2!, @dp)
//   %5 = aten.neg(%3)                            %5 = aten.neg(%3)
//
// Law: any order that respects the dependence graph is valid.
namespace tessera::compiler {

Matched schedule_comm_wait(Program& program) {
  const auto& nodes = program.nodes;
  if (std::none_of(nodes.begin(), nodes.end(), [](const Node& node) { return kind_of(node) == OpKind::Wait; }))
    return {};
  const Dependencies dependencies(program);
  const auto count = program.nodes.size();
  // By node: 1 for a wait, and for a view or copy that depends on such a node. These are placed on demand.
  std::vector<char> late(count, 0);
  for (size_t n = 0; n < count; n++) {
    late[n] = kind_of(program.nodes[n]) == OpKind::Wait;
    if (late[n] || (!is_view(program, program.nodes[n]) && program.nodes[n].name() != "aten.copy_")) continue;
    for (const auto earlier : dependencies.before(n)) late[n] |= late[static_cast<size_t>(earlier)];
  }
  std::vector<int32_t> order;
  std::vector<char> placed(count, 0);
  const std::function<void(size_t)> place = [&](size_t n) {
    if (placed[n]) return;
    for (const auto earlier : dependencies.before(n)) place(static_cast<size_t>(earlier));
    placed[n] = 1;
    order.push_back(static_cast<int32_t>(n));
  };
  for (size_t n = 0; n < count; n++)
    if (!late[n]) place(n);
  for (size_t n = 0; n < count; n++) place(n);
  Matched matched;
  for (size_t i = 0; i < count; i++)
    matched.times += order[i] != static_cast<int32_t>(i) && late[static_cast<size_t>(order[i])];
  reorder(program, order);
  return matched;
}

}  // namespace tessera::compiler
