#pragma once
#include "tessera/base/detail/libtorch_compat.h"
#include "tessera/compile/detail/ir/program.h"

#include <ATen/core/boxing/KernelFunction.h>
#include <ATen/core/stack.h>

#include <optional>

namespace tessera::compiler {

// The kernel of an op for one device, with its arguments.
struct OpKernel {
  c10::OperatorHandle op;
  c10::SafeKernelFunction function;
  c10::DispatchKeySet keys;
  torch::jit::Stack arguments = {};

  // Pushes the results onto the stack.
  void call(torch::jit::Stack& stack) const {
    stack.assign(arguments.begin(), arguments.end());
    function.callBoxed(op, keys, &stack);
  }
};

// The kernel that the dispatcher calls below autograd for tensors of this device.
OpKernel op_kernel_for(const c10::OperatorHandle& op, c10::DeviceType device);

// The out= overload of an op, if it has a kernel for the device. Its arguments are those of the op, then one per
// result.
std::optional<c10::OperatorHandle> out_overload(const c10::OperatorHandle& op, c10::DeviceType device);

}  // namespace tessera::compiler
