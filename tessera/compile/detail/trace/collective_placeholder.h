#pragma once
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace tessera::compiler {

// Replaces a collective while a step is traced: no communication takes place.
// Pops the arguments from the stack and pushes results of the right sizes, filled with zeros.
// An in-place collective returns its argument unchanged.
void push_collective_placeholder(const c10::OperatorHandle& collective, torch::jit::Stack* stack);

}  // namespace tessera::compiler
