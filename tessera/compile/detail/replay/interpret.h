#pragma once
#include "tessera/base/visit.h"
#include "tessera/compile/detail/ir/program.h"

namespace tessera::compiler {

// Runs a program op by op through the dispatcher, including views. Each op allocates its results.
// Slower than Executable, but tracers and debug modes see every op.
// `inputs`: one tensor per program input, of its type; constants of the program may be omitted. Returns the outputs.
Tensors interpret(const Program& program, const Tensors& inputs);

}  // namespace tessera::compiler
