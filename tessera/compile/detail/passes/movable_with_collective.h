#pragma once
#include "tessera/compile/detail/ir/program.h"

namespace tessera::compiler {

// True for ops that prepare the input of a collective and are moved together with it: views, allocations, casts,
// divisions, concatenations.
bool can_move_with_collective(const Program& program, const Node& node);

}  // namespace tessera::compiler
