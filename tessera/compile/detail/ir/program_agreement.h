#pragma once
#include "tessera/compile/detail/ir/program.h"

namespace tessera::compiler {

// Checks that all ranks of each group compiled the same sequence of collectives on it. Call it before the program posts
// its first collective. On a mismatch all ranks throw UsageError with the first line that differs.
void agree_on(const Program& program);

}  // namespace tessera::compiler
