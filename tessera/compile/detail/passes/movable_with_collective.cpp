#include "tessera/compile/detail/passes/movable_with_collective.h"

#include "tessera/compile/detail/ir/op_table.h"

namespace tessera::compiler {
namespace {

constexpr const char* kMovableOps[] = {"aten.div.Tensor", "aten.div.Scalar", "aten.mul.Tensor",         "aten._to_copy",
                                       "aten.cat",        "aten.copy_",      "aten._foreach_div.Scalar"};

}  // namespace

bool can_move_with_collective(const Program& program, const Node& node) {
  if (is_view(program, node) || kind_of(node) == OpKind::Empty) return true;
  const auto name = node.name();
  for (const auto* known : kMovableOps)
    if (name == known) return true;
  return false;
}

}  // namespace tessera::compiler
