#pragma once
#include "tessera/compile/detail/ir/program.h"

namespace tessera::compiler {

// The ranks of each group compare the collectives that the program posts on it, before it posts the first. Throws
// UsageError on all of them where they differ, with the first line that does.
void agree_on(const Program& program);

}  // namespace tessera::compiler
