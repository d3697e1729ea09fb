#include "tessera/compile/detail/ir/split_forward_backward.h"

#include <algorithm>

namespace tessera::compiler {

SplitProgram split_forward_backward(const Program& program, size_t node, size_t first_outputs) {
  SplitProgram split;
  split.first_outputs = first_outputs;
  auto &first = split.first, &second = split.second;
  first = second = program;
  const auto boundary = static_cast<ptrdiff_t>(node), out = static_cast<ptrdiff_t>(first_outputs);
  first.nodes.assign(program.nodes.begin(), program.nodes.begin() + boundary);
  second.nodes.assign(program.nodes.begin() + boundary, program.nodes.end());
  first.outputs.assign(program.outputs.begin(), program.outputs.begin() + out);
  second.outputs.assign(program.outputs.begin() + out, program.outputs.end());

  std::vector<char> defined(program.values.size(), 0), read(program.values.size(), 0);
  for (const auto& each : first.nodes) each.each_result([&](ValueId id) { defined[static_cast<size_t>(id)] = 1; });
  std::vector<ValueId> needed;  // by the second part, from the first
  const auto need = [&](ValueId id) {
    if (defined[static_cast<size_t>(id)] && !std::exchange(read[static_cast<size_t>(id)], 1)) needed.push_back(id);
  };
  for (const auto& each : second.nodes) each.each_read(need);
  for (const auto& output : second.outputs)
    if (output.value != kNone) need(output.value);

  // Each part keeps only the inputs that it uses.
  const auto used_by = [&](const Program& part) {
    std::vector<char> used(program.values.size(), 0);
    for (const auto& each : part.nodes) each.each_read([&](ValueId id) { used[static_cast<size_t>(id)] = 1; });
    for (const auto& output : part.outputs)
      if (output.value != kNone) used[static_cast<size_t>(output.value)] = 1;
    return used;
  };
  for (auto* part : {&first, &second}) {
    const auto used = used_by(*part);
    std::erase_if(part->inputs, [&](const Input& input) { return !used[static_cast<size_t>(input.value)]; });
  }
  const auto external = program.external_buffers();
  for (const auto id : needed) {
    second.inputs.push_back({id, Role::Captured, "saved"});
    const auto buffer = program.buffer_of(id);
    if (external[static_cast<size_t>(buffer)] ||
        std::find(split.saved.begin(), split.saved.end(), buffer) != split.saved.end())
      continue;
    split.saved.push_back(buffer);
    first.outputs.push_back({id, Output::Kind::Return, "saved"});
  }
  return split;
}

}  // namespace tessera::compiler
