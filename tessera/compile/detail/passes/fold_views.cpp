#include "tessera/compile/detail/ir/op_table.h"
#include "tessera/compile/detail/passes/passes.h"

#include <map>
#include <numeric>
#include <tuple>

namespace tessera::compiler {

// t(t(x)) is x. Values name memory, so it does not matter what was written between.
Matched fold_views(Program& program) {
  using Place = std::tuple<int32_t, int64_t, c10::ScalarType, std::vector<int64_t>, std::vector<int64_t>>;
  std::map<Place, ValueId> first;
  std::vector<ValueId> instead(program.values.size());
  std::iota(instead.begin(), instead.end(), 0);
  const auto place = [&](ValueId id) {
    const auto& value = program[id];
    return Place{value.buffer, value.offset, value.type.dtype, value.type.sizes, value.type.strides};
  };
  const auto replaced = [&](ValueId id) { return instead[static_cast<size_t>(id)]; };
  Matched matched;
  std::vector<Node> kept;
  for (const auto& input : program.inputs) first.emplace(place(input.value), input.value);
  for (auto& node : program.nodes) {
    node.replace_reads(replaced);
    bool known = is_view(program, node);
    node.each_result([&](ValueId id) { known &= first.count(place(id)) > 0; });
    if (known) {
      node.each_result([&](ValueId id) { instead[static_cast<size_t>(id)] = first.at(place(id)); });
      matched.times++;
      continue;
    }
    node.each_result([&](ValueId id) { first[place(id)] = id; });
    kept.push_back(std::move(node));
  }
  for (auto& output : program.outputs)
    if (output.value != kNone) output.value = replaced(output.value);
  program.nodes = std::move(kept);
  return matched;
}

}  // namespace tessera::compiler
