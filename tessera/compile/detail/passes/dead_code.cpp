#include "tessera/compile/detail/ir/op_table.h"
#include "tessera/compile/detail/passes/passes.h"

namespace tessera::compiler {

// From the end: a node is needed if it writes memory that is read later, is seen outside, or is more than its results
// (a collective that others take part in, a draw that moves the random stream). A view is needed if it is named later.
Matched dead_code(Program& program) {
  auto read_later = program.external_buffers();
  std::vector<char> named(program.values.size(), 0);
  for (const auto& output : program.outputs) {
    if (output.value == kNone) continue;
    read_later[static_cast<size_t>(program.buffer_of(output.value))] = 1;
    named[static_cast<size_t>(output.value)] = 1;
  }
  std::vector<Node> kept;
  for (size_t n = program.nodes.size(); n-- > 0;) {
    auto& node = program.nodes[n];
    const auto kind = kind_of(node);
    bool needed = kind == OpKind::Collective || kind == OpKind::Wait || kind == OpKind::Random;
    const bool view = is_view(program, node);
    node.each_result([&](ValueId id) {
      needed |= named[static_cast<size_t>(id)] || (!view && read_later[static_cast<size_t>(program.buffer_of(id))]);
    });
    node.each_write([&](ValueId id) { needed |= read_later[static_cast<size_t>(program.buffer_of(id))] != 0; });
    if (!needed) continue;
    node.each_read([&](ValueId id) {
      named[static_cast<size_t>(id)] = 1;
      read_later[static_cast<size_t>(program.buffer_of(id))] = 1;
    });
    kept.push_back(std::move(node));
  }
  const Matched matched{static_cast<int64_t>(program.nodes.size() - kept.size())};
  program.nodes.assign(std::make_move_iterator(kept.rbegin()), std::make_move_iterator(kept.rend()));
  return matched;
}

}  // namespace tessera::compiler
