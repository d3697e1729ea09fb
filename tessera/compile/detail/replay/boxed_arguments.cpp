#include "tessera/compile/detail/replay/boxed_arguments.h"

#include "tessera/base/error.h"

#include <ATen/ScalarOps.h>

namespace tessera::compiler {

c10::IValue boxed(const Program& program, const Arg& arg, const c10::Argument& schema, const Tensors& values) {
  const auto tensor = [&](ValueId id) { return id == kNone ? at::Tensor() : values[static_cast<size_t>(id)]; };
  if (const auto* id = std::get_if<ValueId>(&arg)) return tensor(*id);
  if (const auto* list = std::get_if<ValueList>(&arg)) {
    if (schema.type()->containedTypes()[0]->kind() == c10::TypeKind::OptionalType) {
      c10::List<std::optional<at::Tensor>> tensors;
      for (const auto id : *list) tensors.push_back(id == kNone ? std::nullopt : std::optional(tensor(id)));
      return tensors;
    }
    Tensors tensors;
    for (const auto id : *list) tensors.push_back(tensor(id));
    return tensors;
  }
  if (const auto* group = std::get_if<GroupName>(&arg)) {
    const auto& communicator = program.groups[static_cast<size_t>(group->group)].group;
    TESSERA_CHECK(communicator, UsageError,
                  "a program that was parsed from text has no process groups and cannot run collectives");
    return communicator;
  }
  const auto& constant = std::get<c10::IValue>(arg);
  const bool wants_tensor = schema.type()->kind() == c10::TypeKind::TensorType;
  if (wants_tensor && constant.isScalar()) return at::native::wrapped_scalar_tensor(constant.toScalar());
  return constant;
}

c10::IValue scalar_value(const RuntimeScalar& live, const std::vector<c10::IValue>& numbers) {
  const auto& number = numbers[static_cast<size_t>(live.number)];
  if (number.isInt()) return number.toInt() + live.plus;
  return live.negated ? -number.toDouble() : number.toDouble();
}

}  // namespace tessera::compiler
