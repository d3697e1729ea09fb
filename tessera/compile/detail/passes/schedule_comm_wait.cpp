#include "tessera/compile/detail/ir/dependencies.h"
#include "tessera/compile/detail/ir/op_table.h"
#include "tessera/compile/detail/passes/passes.h"

#include <algorithm>

namespace tessera::compiler {

// Each wait, with what is only there for its sake, moves down to just before the first node that needs it; those that
// nothing needs to the end.
Matched schedule_comm_wait(Program& program) {
  const Dependencies dependencies(program);
  const auto count = program.nodes.size();
  // A node is late if it is a wait, or a view or copy of what a late one gives: they go where they are needed.
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
