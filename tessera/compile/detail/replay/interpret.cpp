#include "tessera/compile/detail/replay/interpret.h"

#include "tessera/compile/detail/codegen/cpp_kernel.h"
#include "tessera/compile/detail/replay/boxed_arguments.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/stack.h>

namespace tessera::compiler {

Tensors interpret(const Program& program, const Tensors& inputs) {
  const at::AutoDispatchBelowADInplaceOrView below;
  const auto library = program.kernels.empty() ? nullptr : codegen::KernelLibrary::load(program.kernels);
  const codegen::KernelLibraryScope generated(library.get());
  Tensors values(program.values.size());
  for (size_t i = 0; i < inputs.size(); i++) values[static_cast<size_t>(program.inputs[i].value)] = inputs[i];
  for (const auto& input : program.inputs)
    if (input.constant.defined()) values[static_cast<size_t>(input.value)] = input.constant;
  std::vector<c10::IValue> numbers;
  for (const auto& number : program.numbers) numbers.push_back(number.read());
  torch::jit::Stack stack;
  for (const auto& node : program.nodes) {
    stack.clear();
    for (size_t i = 0; i < node.args.size(); i++) {
      const auto* live = std::get_if<RuntimeScalar>(&node.args[i]);
      stack.push_back(live ? scalar_value(*live, numbers)
                           : boxed(program, node.args[i], node.schema().arguments()[i], values));
    }
    node.op.callBoxed(stack);
    for (size_t i = 0; i < node.results.size(); i++) {
      if (const auto* id = std::get_if<ValueId>(&node.results[i])) {
        if (*id != kNone) values[static_cast<size_t>(*id)] = stack[i].toTensor();
      } else if (const auto* list = std::get_if<ValueList>(&node.results[i])) {
        const auto made = stack[i].toTensorVector();
        for (size_t k = 0; k < list->size(); k++)
          if ((*list)[k] != kNone) values[static_cast<size_t>((*list)[k])] = made[k];
      }
    }
  }
  Tensors outputs;
  for (const auto& output : program.outputs)
    outputs.push_back(output.value == kNone ? at::Tensor() : values[static_cast<size_t>(output.value)]);
  return outputs;
}

}  // namespace tessera::compiler
