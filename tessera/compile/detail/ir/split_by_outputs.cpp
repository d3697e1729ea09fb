#include "tessera/compile/detail/ir/split_by_outputs.h"

#include "tessera/compile/detail/ir/dependencies.h"
#include "tessera/compile/detail/ir/op_table.h"

#include <algorithm>

namespace tessera::compiler {
namespace {

// By node: 1 if the outputs in `first` need it.
std::vector<char> nodes_of_outputs(const Program& program, const std::vector<char>& first) {
  std::vector<char> in_output(static_cast<size_t>(program.buffers), 0);
  for (size_t i = 0; i < program.outputs.size(); i++)
    if (first[i] && program.outputs[i].value != kNone)
      in_output[static_cast<size_t>(program.buffer_of(program.outputs[i].value))] = 1;
  const Dependencies dependencies(program);
  std::vector<char> needed(program.nodes.size(), 0);
  std::vector<int32_t> open;
  const auto need = [&](int32_t node) {
    if (!std::exchange(needed[static_cast<size_t>(node)], 1)) open.push_back(node);
  };
  for (size_t n = 0; n < program.nodes.size(); n++) {
    // An output is what is in memory at the end: all writes of its buffer count.
    const auto need_if_output = [&](ValueId id) {
      if (in_output[static_cast<size_t>(program.buffer_of(id))]) need(static_cast<int32_t>(n));
    };
    program.nodes[n].each_write(need_if_output);
    program.nodes[n].each_result(need_if_output);
  }
  while (!open.empty()) {
    const auto node = static_cast<size_t>(open.back());
    open.pop_back();
    for (const auto before : dependencies.before(node)) need(before);
    if (kind_of(program.nodes[node]) != OpKind::Collective) continue;
    for (const auto after : dependencies.after(node))
      if (kind_of(program.nodes[static_cast<size_t>(after)]) == OpKind::Wait) need(after);
  }
  return needed;
}

}  // namespace

SplitProgram split_by_outputs(Program program, const std::vector<char>& first) {
  const auto needed = nodes_of_outputs(program, first);
  std::vector<int32_t> order(program.nodes.size());
  for (size_t n = 0; n < order.size(); n++) order[n] = static_cast<int32_t>(n);
  const auto rest = std::stable_partition(order.begin(), order.end(),
                                          [&](int32_t node) { return needed[static_cast<size_t>(node)] != 0; });
  const auto boundary = static_cast<size_t>(rest - order.begin());
  reorder(program, order);
  std::vector<Output> outputs, later;
  for (size_t i = 0; i < program.outputs.size(); i++) (first[i] ? outputs : later).push_back(program.outputs[i]);
  const auto first_outputs = outputs.size();
  outputs.insert(outputs.end(), later.begin(), later.end());
  program.outputs = std::move(outputs);
  return split_forward_backward(program, boundary, first_outputs);
}

}  // namespace tessera::compiler
