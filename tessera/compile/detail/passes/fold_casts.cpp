#include "tessera/compile/detail/ir/def_use.h"
#include "tessera/compile/detail/ir/op_table.h"
#include "tessera/compile/detail/passes/passes.h"

// Copies from the value that was cast, without the cast.
//
//   %1: f32[8] = aten._to_copy(%0, 6, ...)           %1: f32[8] = aten._to_copy(%0, 6, ...)     which dead_code removes
//   %3: f32[8] in %2 = aten.copy_(%2!, %1, false) -> %3: f32[8] in %2 = aten.copy_(%2!, %0, false)
//
// Law: copy_ converts to the dtype of its destination, as the cast did. It reads later than the cast, so nothing may
// write to the value in between: the program must own its memory and never write to it again.
namespace tessera::compiler {
namespace {

// The value that a cast converts; kNone if the node is not a cast, or if its argument may change.
ValueId cast_argument(const Program& program, const DefUse& def_use, const Node* cast) {
  if (!cast || cast->name() != "aten._to_copy") return kNone;
  const auto* from = std::get_if<ValueId>(cast->args.data());
  if (!from || *from == kNone || !def_use.is_immutable(program, *from)) return kNone;
  const auto &before = program[*from].type, &after = program[std::get<ValueId>(cast->results[0])].type;
  return before.device == after.device && !before.conj && !before.neg ? *from : kNone;
}

}  // namespace

Matched fold_casts(Program& program) {
  const DefUse def_use(program);
  Matched matched;
  for (auto& node : program.nodes) {
    if (node.name() != "aten.copy_") continue;
    const auto to = std::get<ValueId>(node.args[0]);
    auto* source = std::get_if<ValueId>(&node.args[1]);
    if (!source || *source == kNone || program[*source].type.dtype != program[to].type.dtype) continue;
    const auto from = cast_argument(program, def_use, def_use.def(program, *source));
    if (from == kNone) continue;
    *source = from;
    matched.times++;
  }
  return matched;
}

}  // namespace tessera::compiler
