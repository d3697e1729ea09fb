#pragma once
#include "tessera/base/visit.h"
#include "tessera/compile/detail/ir/program.h"

namespace tessera::compiler {

// Converts an argument of a node to the IValue that the boxed kernel of the op takes.
// `values`: tensors by ValueId. Not for RuntimeScalar arguments.
c10::IValue boxed(const Program& program, const Arg& arg, const c10::Argument& schema, const Tensors& values);

// The value of a RuntimeScalar argument. `numbers`: the current values of program.numbers.
c10::IValue scalar_value(const RuntimeScalar& live, const std::vector<c10::IValue>& numbers);

}  // namespace tessera::compiler
