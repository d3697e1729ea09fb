#pragma once
#include "tessera/base/detail/libtorch_compat.h"
#include "tessera/compile/detail/ir/program.h"

#include <ATen/core/boxing/KernelFunction.h>
#include <ATen/core/stack.h>

#include <optional>

namespace tessera::compiler {

// The kernel of an op for one device, with its arguments, ready to be called again and again.
struct Kernel {
  c10::OperatorHandle op;
  c10::SafeKernelFunction function;
  c10::DispatchKeySet keys;
  torch::jit::Stack arguments = {};

  // Leaves the results on the stack.
  void call(torch::jit::Stack& stack) const {
    stack.assign(arguments.begin(), arguments.end());
    function.callBoxed(op, keys, &stack);
  }
};

// The kernel that the dispatcher would call for tensors of this device below autograd.
Kernel kernel_of(const c10::OperatorHandle& op, c10::DeviceType device);

// The op's form that writes into tensors given to it, if that has a kernel of its own for the device: the arguments are
// the op's and then one for each result.
std::optional<c10::OperatorHandle> out_form(const c10::OperatorHandle& op, c10::DeviceType device);

}  // namespace tessera::compiler
