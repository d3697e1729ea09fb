#include "tessera/compile/detail/ir/def_use.h"

#include "tessera/compile/detail/ir/op_table.h"

namespace tessera::compiler {

Uses::Uses(const Program& program)
    : made_by(program.values.size(), -1),
      readers(program.values.size()),
      put_out(program.values.size(), 0),
      external(program.external_buffers()),
      seen(external.size(), 0),
      bound(external.size(), 0),
      writes(external.size(), 0) {
  for (size_t n = 0; n < program.nodes.size(); n++) {
    const auto& node = program.nodes[n];
    const auto at = static_cast<int32_t>(n);
    node.each_read([&](ValueId id) {
      auto& all = readers[static_cast<size_t>(id)];
      if (all.empty() || all.back() != at) all.push_back(at);
    });
    node.each_result([&](ValueId id) { made_by[static_cast<size_t>(id)] = at; });
    if (kind_of(node) != OpKind::Wait)
      node.each_write([&](ValueId id) { writes[static_cast<size_t>(program.buffer_of(id))]++; });
  }
  for (const auto& output : program.outputs) {
    if (output.value == kNone) continue;
    put_out[static_cast<size_t>(output.value)] = 1;
    const auto b = static_cast<size_t>(program.buffer_of(output.value));
    seen[b] = 1;
    if (output.kind != Output::Kind::Return) bound[b] = 1;
  }
}

bool is_whole(const Program& program, ValueId id, const std::vector<int64_t>& buffer_bytes) {
  const auto& value = program[id];
  return value.offset == 0 && value.type.is_contiguous() &&
         value.type.bytes() == buffer_bytes[static_cast<size_t>(value.buffer)];
}

const c10::IValue* constant_in(const Arg& arg) { return std::get_if<c10::IValue>(&arg); }

int64_t size_of_group(const Program& program, int32_t group) {
  return static_cast<int64_t>(program.groups[static_cast<size_t>(group)].ranks.size());
}

}  // namespace tessera::compiler
