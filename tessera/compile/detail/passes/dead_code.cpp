#include "tessera/compile/detail/ir/op_table.h"
#include "tessera/compile/detail/passes/passes.h"

// Dead code elimination: removes nodes whose results are never used.
//
//   %1: f32[8] = aten.exp(%0)                ->
//   %2: f32[8] = aten.neg(%0)                      %2: f32[8] = aten.neg(%0)
//   return %2                                      return %2
//
// Law: a node without side effects whose results and writes are not read can go. Side effects are collectives (other
// ranks take part), draws (they advance the random generator), checks and writes to memory of the caller. The pass
// walks backwards: a node is live if it writes a buffer that is read later; a view is live if its value is used later.
namespace tessera::compiler {

Matched dead_code(Program& program) {
  auto read_later = program.external_buffers();
  std::vector<char> value_used(program.values.size(), 0);
  for (const auto& output : program.outputs) {
    if (output.value == kNone) continue;
    read_later[static_cast<size_t>(program.buffer_of(output.value))] = 1;
    value_used[static_cast<size_t>(output.value)] = 1;
  }
  std::vector<Node> kept;
  for (size_t n = program.nodes.size(); n-- > 0;) {
    auto& node = program.nodes[n];
    const auto kind = kind_of(node);
    bool needed = kind == OpKind::Collective || kind == OpKind::Wait || kind == OpKind::Check ||
                  (kind == OpKind::Random && node.name() != "tessera.rng_state");
    const bool view = is_view(program, node);
    node.each_result([&](ValueId id) {
      needed |=
          value_used[static_cast<size_t>(id)] || (!view && read_later[static_cast<size_t>(program.buffer_of(id))]);
    });
    node.each_write([&](ValueId id) { needed |= read_later[static_cast<size_t>(program.buffer_of(id))] != 0; });
    if (!needed) continue;
    node.each_read([&](ValueId id) {
      value_used[static_cast<size_t>(id)] = 1;
      read_later[static_cast<size_t>(program.buffer_of(id))] = 1;
    });
    kept.push_back(std::move(node));
  }
  const Matched matched{static_cast<int64_t>(program.nodes.size() - kept.size())};
  program.nodes.assign(std::make_move_iterator(kept.rbegin()), std::make_move_iterator(kept.rend()));
  return matched;
}

}  // namespace tessera::compiler
