#include "tessera/compile/detail/ir/def_use.h"

#include "tessera/compile/detail/ir/op_table.h"

namespace tessera::compiler {

DefUse::DefUse(const Program& program)
    : def_node(program.values.size(), -1),
      users(program.values.size()),
      is_output(program.values.size(), 0),
      external(program.external_buffers()),
      has_output(external.size(), 0),
      retained(external.size(), 0),
      writes(external.size(), 0) {
  for (size_t n = 0; n < program.nodes.size(); n++) {
    const auto& node = program.nodes[n];
    const auto at = static_cast<int32_t>(n);
    node.each_read([&](ValueId id) {
      auto& all = users[static_cast<size_t>(id)];
      if (all.empty() || all.back() != at) all.push_back(at);
    });
    node.each_result([&](ValueId id) { def_node[static_cast<size_t>(id)] = at; });
    if (kind_of(node) != OpKind::Wait)
      node.each_write([&](ValueId id) { writes[static_cast<size_t>(program.buffer_of(id))]++; });
  }
  for (const auto& output : program.outputs) {
    if (output.value == kNone) continue;
    is_output[static_cast<size_t>(output.value)] = 1;
    const auto b = static_cast<size_t>(program.buffer_of(output.value));
    has_output[b] = 1;
    if (output.kind != Output::Kind::Return) retained[b] = 1;
  }
}

bool covers_buffer(const Program& program, ValueId id, const std::vector<int64_t>& buffer_bytes) {
  const auto& value = program[id];
  return value.offset == 0 && value.type.is_contiguous() &&
         value.type.bytes() == buffer_bytes[static_cast<size_t>(value.buffer)];
}

const c10::IValue* constant_or_null(const Arg& arg) { return std::get_if<c10::IValue>(&arg); }

bool is_one(const Arg& arg) {
  const auto* constant = constant_or_null(arg);
  return constant && constant->isScalar() && constant->toScalar().toDouble() == 1.0;
}

Node allocation_of(const Program& program, ValueId id) {
  const auto& type = program[id].type;
  return {find_op("aten.empty_strided"),
          {c10::IValue(type.sizes), c10::IValue(type.strides), c10::IValue(static_cast<int64_t>(type.dtype)),
           c10::IValue(), c10::IValue(type.device), c10::IValue()},
          {id}};
}

int64_t group_size(const Program& program, int32_t group) {
  return static_cast<int64_t>(program.groups[static_cast<size_t>(group)].ranks.size());
}

std::vector<std::vector<ValueId>> values_by_buffer(const Program& program) {
  std::vector<std::vector<ValueId>> values(static_cast<size_t>(program.buffers));
  for (size_t v = 0; v < program.values.size(); v++)
    if (program.values[v].buffer >= 0)
      values[static_cast<size_t>(program.values[v].buffer)].push_back(static_cast<ValueId>(v));
  return values;
}

void ReplacedValues::rewrite_outputs(Program& program) const {
  for (auto& output : program.outputs)
    if (output.value != kNone) output.value = (*this)(output.value);
}

void move_views(Program& program, const std::vector<ValueId>& views, ValueId now) {
  const auto shift = program[now].offset * program[now].type.itemsize();  // bytes
  for (const auto id : views) {
    auto& value = program.values[static_cast<size_t>(id)];
    value.buffer = program.buffer_of(now);
    value.offset += shift / value.type.itemsize();
  }
}

}  // namespace tessera::compiler
