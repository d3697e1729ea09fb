#include "tessera/compile/detail/ir/def_use.h"
#include "tessera/compile/detail/ir/op_table.h"
#include "tessera/compile/detail/passes/passes.h"

#include <map>
#include <tuple>

// Removes views that alias exactly the memory of an earlier value.
//
//   %1: f32[3, 2]{1, 3} in %0 = aten.t(%0)
//   %2: f32[2, 3] in %0 = aten.t(%1)            ->    %1: f32[3, 2]{1, 3} in %0 = aten.t(%0)
//   %3: f32[2, 3] = aten.neg(%2)                      %3: f32[2, 3] = aten.neg(%0)
//
// Law: t(t(x)) = x; two values with the same buffer, offset and type are the same. Values name memory, so writes
// between the two views do not matter.
namespace tessera::compiler {

Matched fold_views(Program& program) {
  using Region = std::tuple<int32_t, int64_t, c10::ScalarType, std::vector<int64_t>, std::vector<int64_t>, bool, bool>;
  std::map<Region, ValueId> first;
  ReplacedValues replaced(program);
  const auto region = [&](ValueId id) {
    const auto& value = program[id];
    const auto& type = value.type;
    return Region{value.buffer, value.offset, type.dtype, type.sizes, type.strides, type.conj, type.neg};
  };
  Matched matched;
  std::vector<Node> kept;
  for (const auto& input : program.inputs) first.emplace(region(input.value), input.value);
  for (auto& node : program.nodes) {
    replaced.rewrite_reads(node);
    bool known = is_view(program, node);
    node.each_result([&](ValueId id) { known &= first.count(region(id)) > 0; });
    if (known) {
      node.each_result([&](ValueId id) { replaced.set(id, first.at(region(id))); });
      matched.times++;
      continue;
    }
    node.each_result([&](ValueId id) { first[region(id)] = id; });
    kept.push_back(std::move(node));
  }
  replaced.rewrite_outputs(program);
  program.nodes = std::move(kept);
  return matched;
}

}  // namespace tessera::compiler
