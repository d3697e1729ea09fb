#include "tessera/compile/detail/ir/op_table.h"
#include "tessera/compile/detail/ir/print.h"
#include "tessera/compile/detail/passes/passes.h"

#include <map>
#include <numeric>
#include <sstream>

namespace tessera::compiler {
namespace {

// Buffers that must stay as they are: seen outside, or written again after they were made.
std::vector<char> not_to_be_shared(const Program& program) {
  auto fixed = program.external_buffers();
  for (const auto& output : program.outputs)
    if (output.value != kNone) fixed[static_cast<size_t>(program.buffer_of(output.value))] = 1;
  for (const auto& node : program.nodes)
    node.each_write([&](ValueId id) { fixed[static_cast<size_t>(program.buffer_of(id))] = 1; });
  return fixed;
}

}  // namespace

Matched common_subexpressions(Program& program) {
  const auto fixed = not_to_be_shared(program);
  std::vector<int64_t> writes(static_cast<size_t>(program.buffers), 0);  // so far, by buffer
  std::map<std::string, size_t> made;                                    // op, arguments and their state -> node kept
  std::vector<ValueId> instead(program.values.size());
  std::iota(instead.begin(), instead.end(), 0);
  const auto replaced = [&](ValueId id) { return instead[static_cast<size_t>(id)]; };
  Matched matched;
  std::vector<Node> kept;
  for (auto& node : program.nodes) {
    node.replace_reads(replaced);
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
      const auto [found, added] = made.emplace(key.str(), kept.size());
      if (!added) {
        std::vector<ValueId> first;
        kept[found->second].each_result([&](ValueId id) { first.push_back(id); });
        // Values that lie in the memory of this one's results now lie in that of the first's.
        size_t next = 0;
        node.each_result([&](ValueId id) {
          const auto gone = program.buffer_of(id), stays = program.buffer_of(first[next]);
          instead[static_cast<size_t>(id)] = first[next++];
          for (auto& value : program.values)
            if (value.buffer == gone) value.buffer = stays;
        });
        matched.times++;
        continue;
      }
    }
    node.each_write([&](ValueId id) { writes[static_cast<size_t>(program.buffer_of(id))]++; });
    kept.push_back(std::move(node));
  }
  for (auto& output : program.outputs)
    if (output.value != kNone) output.value = replaced(output.value);
  program.nodes = std::move(kept);
  return matched;
}

}  // namespace tessera::compiler
