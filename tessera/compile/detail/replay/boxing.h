#pragma once
#include "tessera/base/visit.h"
#include "tessera/compile/detail/ir/program.h"

namespace tessera::compiler {

// An argument as the op's boxed kernel takes it. `values`: the tensors, by ValueId. Not for live numbers.
c10::IValue boxed(const Program& program, const Arg& arg, const c10::Argument& described, const Tensors& values);

// `numbers`: what program.numbers read as.
c10::IValue number_of(const Live& live, const std::vector<c10::IValue>& numbers);

}  // namespace tessera::compiler
