#include "tessera/compile/detail/ir/schema_match.h"

#include <algorithm>

namespace tessera::compiler {
namespace {

using c10::TypeKind;

const c10::Type& without_optional(const c10::Type& type) {
  return type.kind() == TypeKind::OptionalType ? without_optional(*type.containedTypes()[0]) : type;
}

bool is_tensor(const c10::Type& type) { return without_optional(type).kind() == TypeKind::TensorType; }
bool is_tensor_list(const c10::Type& type) {
  const auto& list = without_optional(type);
  return list.kind() == TypeKind::ListType && is_tensor(*list.containedTypes()[0]);
}
bool takes_number(const c10::Type& type) {
  const auto kind = without_optional(type).kind();
  return kind == TypeKind::TensorType || kind == TypeKind::NumberType || kind == TypeKind::FloatType ||
         kind == TypeKind::IntType || kind == TypeKind::SymIntType;
}

bool constant_fits(const c10::IValue& constant, const c10::Type& type) {
  const bool is_number = constant.isInt() || constant.isDouble() || constant.isBool() || constant.isComplexDouble();
  switch (type.kind()) {
    case TypeKind::OptionalType:
      return constant.isNone() || constant_fits(constant, *type.containedTypes()[0]);
    case TypeKind::TensorType:
    case TypeKind::NumberType:
      return is_number;
    case TypeKind::IntType:  // and dtypes, layouts, memory formats
    case TypeKind::SymIntType:
      return constant.isInt();
    case TypeKind::FloatType:
      return constant.isDouble();
    case TypeKind::BoolType:
      return constant.isBool();
    case TypeKind::StringType:
      return constant.isString();
    case TypeKind::DeviceObjType:
      return constant.isDevice();
    case TypeKind::ListType: {
      if (!constant.isList()) return false;
      const auto items = constant.toListRef();
      return std::all_of(items.begin(), items.end(),
                         [&](const c10::IValue& item) { return constant_fits(item, *type.containedTypes()[0]); });
    }
    case TypeKind::GeneratorType:
      return constant.isNone() || constant.isGenerator();
    default:  // streams and other objects: programs have none
      return constant.isNone();
  }
}

}  // namespace

bool argument_fits(const Arg& arg, const c10::Type& type) {
  if (std::holds_alternative<ValueId>(arg)) return is_tensor(type);
  if (std::holds_alternative<ValueList>(arg)) return is_tensor_list(type);
  if (std::holds_alternative<RuntimeScalar>(arg)) return takes_number(type);
  if (std::holds_alternative<GroupName>(arg)) return without_optional(type).kind() == TypeKind::ClassType;
  return constant_fits(std::get<c10::IValue>(arg), type);
}

bool result_fits(const Arg& result, const c10::Type& type) {
  if (std::holds_alternative<ValueId>(result)) return is_tensor(type);
  if (std::holds_alternative<ValueList>(result)) return is_tensor_list(type);
  return std::holds_alternative<c10::IValue>(result) && !is_tensor(type) && !is_tensor_list(type);
}

}  // namespace tessera::compiler
