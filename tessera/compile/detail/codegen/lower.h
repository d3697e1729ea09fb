#pragma once
#include "tessera/compile/detail/api/compile_settings.h"

namespace tessera::compiler {

// Lowers a program after its passes: collectives become in-place ones, pointwise ops become generated kernels. With
// Numerics::Fast, large matrix products are tiled where that is faster, and small ops are fused.
// If kernels cannot be built, for example without a compiler, it warns once and leaves the ops. A program for a custom
// runner (CompileOptions::run_with) is not lowered.
std::vector<PassReport> lower(Program& program, const Settings& settings);

}  // namespace tessera::compiler
