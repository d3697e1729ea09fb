#pragma once
#include "tessera/compile/detail/ir/program.h"

namespace tessera::compiler {

// Is this something that is done to a tensor on its way to a collective: a view, a cast, a division?
bool is_on_the_way(const Program& program, const Node& node);

}  // namespace tessera::compiler
