#include "tessera/compile/detail/ir/split_forward_backward.h"

#include <algorithm>

namespace tessera::compiler {

Halves split_at(const Program& program, size_t node, size_t first_outputs) {
  Halves halves;
  halves.first_outputs = first_outputs;
  auto &first = halves.first, &second = halves.second;
  first = second = program;
  const auto cut = static_cast<ptrdiff_t>(node), out = static_cast<ptrdiff_t>(first_outputs);
  first.nodes.assign(program.nodes.begin(), program.nodes.begin() + cut);
  second.nodes.assign(program.nodes.begin() + cut, program.nodes.end());
  first.outputs.assign(program.outputs.begin(), program.outputs.begin() + out);
  second.outputs.assign(program.outputs.begin() + out, program.outputs.end());

  std::vector<char> defined(program.values.size(), 0), is_input(program.values.size(), 0),
      read(program.values.size(), 0);
  for (const auto& input : program.inputs) is_input[static_cast<size_t>(input.value)] = 1;
  for (const auto& each : first.nodes) each.each_result([&](ValueId id) { defined[static_cast<size_t>(id)] = 1; });
  std::vector<ValueId> needed;  // of the first half, by the second
  const auto need = [&](ValueId id) {
    if (defined[static_cast<size_t>(id)] && !std::exchange(read[static_cast<size_t>(id)], 1)) needed.push_back(id);
  };
  for (const auto& each : second.nodes) each.each_read(need);
  for (const auto& output : second.outputs)
    if (output.value != kNone) need(output.value);

  // Inputs that a half does not use are not its.
  const auto used_by = [&](const Program& half) {
    std::vector<char> used(program.values.size(), 0);
    for (const auto& each : half.nodes) each.each_read([&](ValueId id) { used[static_cast<size_t>(id)] = 1; });
    for (const auto& output : half.outputs)
      if (output.value != kNone) used[static_cast<size_t>(output.value)] = 1;
    return used;
  };
  for (auto* half : {&first, &second}) {
    const auto used = used_by(*half);
    std::erase_if(half->inputs, [&](const Input& input) { return !used[static_cast<size_t>(input.value)]; });
  }
  const auto external = program.external_buffers();
  for (const auto id : needed) {
    second.inputs.push_back({id, Role::Captured, "saved"});
    const auto buffer = program.buffer_of(id);
    if (external[static_cast<size_t>(buffer)] ||
        std::find(halves.saved.begin(), halves.saved.end(), buffer) != halves.saved.end())
      continue;
    halves.saved.push_back(buffer);
    first.outputs.push_back({id, Output::Kind::Return, "saved"});
  }
  return halves;
}

}  // namespace tessera::compiler
