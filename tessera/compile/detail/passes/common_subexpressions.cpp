#include "tessera/compile/detail/ir/def_use.h"
#include "tessera/compile/detail/ir/op_table.h"
#include "tessera/compile/detail/ir/print.h"
#include "tessera/compile/detail/passes/passes.h"

#include <map>
#include <sstream>
#include <utility>

// Common subexpression elimination: computes equal expressions once.
//
//   %1: f32[8] = aten.exp(%0)                      %1: f32[8] = aten.exp(%0)
//   %2: f32[8] = aten.exp(%0)                ->
//   %3: f32[8] = aten.add.Tensor(%1, %2, 1)        %3: f32[8] = aten.add.Tensor(%1, %1, 1)
//
// Law: two pure ops with equal arguments have equal results, if no op writes the arguments between the two.
namespace tessera::compiler {
namespace {

// Buffers that two results must not share: the caller sees them, or an op writes to them.
std::vector<char> unshareable_buffers(const Program& program) {
  auto fixed = program.external_buffers();
  for (const auto& output : program.outputs)
    if (output.value != kNone) fixed[static_cast<size_t>(program.buffer_of(output.value))] = 1;
  for (const auto& node : program.nodes)
    node.each_write([&](ValueId id) { fixed[static_cast<size_t>(program.buffer_of(id))] = 1; });
  return fixed;
}

}  // namespace

Matched common_subexpressions(Program& program) {
  const auto fixed = unshareable_buffers(program);
  std::vector<int64_t> writes(static_cast<size_t>(program.buffers), 0);  // so far, by buffer
  std::map<std::string, size_t> available;  // op, arguments and their write counts -> kept node
  ReplacedValues replaced(program);
  Matched matched;
  auto in_buffer = values_by_buffer(program);
  std::vector<Node> kept;
  for (auto& node : program.nodes) {
    replaced.rewrite_reads(node);
    bool shareable = is_pure(node) && !is_view(program, node) && kind_of(node) != OpKind::Empty;
    node.each_result([&](ValueId id) { shareable &= !fixed[static_cast<size_t>(program.buffer_of(id))]; });
    if (shareable) {
      std::ostringstream key;
      key << node.name();
      for (const auto& arg : node.args) {
        key << ",";
        print_arg(key, program, arg);
      }
      node.each_read([&](ValueId id) { key << ":" << writes[static_cast<size_t>(program.buffer_of(id))]; });
      const auto [found, added] = available.emplace(key.str(), kept.size());
      if (!added) {
        std::vector<ValueId> first;
        kept[found->second].each_result([&](ValueId id) { first.push_back(id); });
        // Values that alias these results now alias those of the first node.
        size_t next = 0;
        node.each_result([&](ValueId id) {
          const auto removed = program.buffer_of(id), kept_buffer = program.buffer_of(first[next]);
          replaced.set(id, first[next++]);
          for (const auto value : std::exchange(in_buffer[static_cast<size_t>(removed)], {})) {
            program.values[static_cast<size_t>(value)].buffer = kept_buffer;
            in_buffer[static_cast<size_t>(kept_buffer)].push_back(value);
          }
        });
        matched.times++;
        continue;
      }
    }
    node.each_write([&](ValueId id) { writes[static_cast<size_t>(program.buffer_of(id))]++; });
    kept.push_back(std::move(node));
  }
  replaced.rewrite_outputs(program);
  program.nodes = std::move(kept);
  return matched;
}

}  // namespace tessera::compiler
