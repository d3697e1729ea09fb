#pragma once
#include "tessera/compile/api/options.h"

namespace tessera::compiler {

// What is done to a program after its passes, as the settings say, so that it runs well: collectives work in place,
// pointwise ops become generated functions. Where they cannot be built (no compiler, say), that is said once and the
// program stays as it is. For a runner that is not ours nothing is done.
std::vector<PassReport> lower(Program& program, const Settings& settings);

}  // namespace tessera::compiler
