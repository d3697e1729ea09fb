#pragma once
#include "tessera/base/visit.h"
#include "tessera/compile/detail/ir/program.h"

namespace tessera::compiler {

// Runs a program op by op through the dispatcher, views included, each result in memory of its own: slow, and seen by
// tracers and debug modes. `inputs`: a tensor for each of program.inputs, of its type. Gives the outputs. Constants
// that the program carries need not be among the inputs.
Tensors interpret(const Program& program, const Tensors& inputs);

}  // namespace tessera::compiler
