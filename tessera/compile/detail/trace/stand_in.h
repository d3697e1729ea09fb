#pragma once
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace tessera::compiler {

// Puts tensors of the right shape in the place of a collective's arguments, as the op would, without communicating:
// zeros where other ranks' values would be. An op that writes into an argument gives that one back.
void stand_in(const c10::OperatorHandle& collective, torch::jit::Stack* stack);

}  // namespace tessera::compiler
