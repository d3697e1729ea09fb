#include "tessera/compile/detail/ir/program.h"

#include "tessera/base/error.h"
#include "tessera/compile/detail/ir/op_table.h"

#include <algorithm>
#include <ostream>
#include <sstream>

namespace tessera::compiler {
namespace {

constexpr const char* kRoles[] = {"parameter", "buffer", "state", "gradient", "argument", "captured", "constant"};

}  // namespace

bool same(const Arg& a, const Arg& b) {
  if (a.index() != b.index()) return false;
  const auto* constant = std::get_if<c10::IValue>(&a);
  if (!constant) return a == b;
  const auto& other = std::get<c10::IValue>(b);
  return constant->tagKind() == other.tagKind() && *constant == other;
}

std::string Node::name() const {
  auto name = op.operator_name().name;
  name.replace(name.find("::"), 2, ".");
  return op.operator_name().overload_name.empty() ? name : name + "." + op.operator_name().overload_name;
}

bool Node::writes(size_t argument) const { return writes_argument(op, argument); }
void Node::replace_reads(const std::function<ValueId(ValueId)>& with) {
  for (auto& arg : args) {
    if (auto* value = std::get_if<ValueId>(&arg)) {
      if (*value != kNone) *value = with(*value);
    } else if (auto* list = std::get_if<ValueList>(&arg)) {
      for (auto& id : *list)
        if (id != kNone) id = with(id);
    }
  }
}

c10::OperatorHandle find_op(const std::string& name) {
  const auto first = name.find('.'), second = name.find('.', first + 1);
  TESSERA_CHECK(first != std::string::npos, UsageError, "\"", name,
                "\" is not the name of an op; write it like aten.add.Tensor");
  const auto base = name.substr(0, first) + "::" + name.substr(first + 1, second - first - 1);
  const auto overload = second == std::string::npos ? "" : name.substr(second + 1);
  auto& dispatcher = c10::Dispatcher::singleton();
  if (auto found = dispatcher.findSchema({base, overload})) return *found;
  std::vector<std::string> like;
  for (const auto& known : dispatcher.getAllOpNames())
    if (known.name == base)
      like.push_back(known.overload_name.empty() ? known.name : known.name + "." + known.overload_name);
  TESSERA_FAIL(UsageError, "unknown op ", name, like.empty() ? "" : "; overloads that exist: ", c10::Join(", ", like));
}

std::ostream& operator<<(std::ostream& out, Role role) { return out << kRoles[static_cast<size_t>(role)]; }

ValueId Program::add(Type type) {
  values.push_back({std::move(type), buffers++, 0});
  return static_cast<ValueId>(values.size() - 1);
}
ValueId Program::add_in(ValueId other, Type type, int64_t offset) {
  values.push_back({std::move(type), buffer_of(other), offset});
  return static_cast<ValueId>(values.size() - 1);
}

std::vector<char> Program::external_buffers() const {
  std::vector<char> external(static_cast<size_t>(buffers), 0);
  for (const auto& input : inputs) external[static_cast<size_t>(buffer_of(input.value))] = 1;
  return external;
}

std::vector<int64_t> Program::buffer_bytes() const {
  std::vector<int64_t> bytes(static_cast<size_t>(buffers), 0);
  for (const auto& value : values) {
    if (value.buffer < 0) continue;
    auto& size = bytes[static_cast<size_t>(value.buffer)];
    const auto span = value.type.span();
    if (span > 0) size = std::max(size, (value.offset + span) * value.type.itemsize());
  }
  return bytes;
}

void renumber(Program& program) {
  std::vector<ValueId> new_id(program.values.size(), kNone);
  std::vector<int32_t> new_buffer(static_cast<size_t>(program.buffers), -1);
  std::vector<Value> values;
  int32_t buffers = 0;
  const auto define = [&](ValueId id) {
    if (new_id[static_cast<size_t>(id)] != kNone) return;
    new_id[static_cast<size_t>(id)] = static_cast<ValueId>(values.size());
    auto value = program[id];
    auto& buffer = new_buffer[static_cast<size_t>(value.buffer)];
    if (buffer < 0) buffer = buffers++;
    value.buffer = buffer;
    values.push_back(std::move(value));
  };
  for (const auto& input : program.inputs) define(input.value);
  for (const auto& node : program.nodes) node.each_result(define);
  const auto renamed = [&](ValueId id) { return new_id[static_cast<size_t>(id)]; };
  for (auto& input : program.inputs) input.value = renamed(input.value);
  for (auto& node : program.nodes) {
    node.replace_reads(renamed);
    std::swap(node.args, node.results);
    node.replace_reads(renamed);
    std::swap(node.args, node.results);
  }
  for (auto& output : program.outputs)
    if (output.value != kNone) output.value = renamed(output.value);
  program.values = std::move(values);
  program.buffers = buffers;
}

}  // namespace tessera::compiler
