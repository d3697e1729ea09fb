#pragma once
#include "tessera/compile/detail/ir/program.h"

namespace tessera::compiler {

// Whether an argument of a node can be passed for a parameter of this type in the op's schema: a value for a tensor, a
// list of values for a list of tensors, a group for a group, a constant or a runtime scalar for the rest. A number in
// place of a tensor is a wrapped number.
bool argument_fits(const Arg& arg, const c10::Type& type);
// The same for a result: a value, a list of values, or a constant where the schema has no tensor.
bool result_fits(const Arg& result, const c10::Type& type);

}  // namespace tessera::compiler
