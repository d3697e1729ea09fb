#pragma once
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

// Elementwise ops with the same bits for an element at every offset and in tensors of every length.
//
// ATen computes the last elements of a tensor, and of a thread's part, with scalar code, whose exp, tanh, pow or a +
// b*c has other bits than the vector code. So the op runs on buffers that begin at 64 bytes, have a multiple of 64
// elements, and are short enough for one thread: vector code computes every element. Tensors that are like this run as
// they are.
namespace tessera::numerics {

// Runs an elementwise op, functional or in-place, on plain CPU tensors. The results replace the arguments on the stack.
void run_elementwise(const c10::OperatorHandle& op, torch::jit::Stack* stack);

// The op tessera::elementwise_<name of op>, which has the schema of the op and runs it by run_elementwise(): for
// programs. Registers it on first use.
c10::OperatorHandle registered_elementwise(const c10::OperatorHandle& op);

}  // namespace tessera::numerics
