#include "tessera/nn/detail/deferred/call.h"

#include "tessera/dtensor/detail/meta.h"

#include <algorithm>

namespace tessera::detail::deferred {
namespace {

bool contains_tensors(const c10::Type& type) {
  return type.kind() == c10::TypeKind::TensorType ||
         (type.kind() == c10::TypeKind::ListType && contains_tensors(*type.containedType(0)));
}

}  // namespace

DeferredCall::DeferredCall(const c10::OperatorHandle& op, const torch::jit::Stack& stack)
    : op(op),
      schema(op.schema()),
      arguments(stack.end() - static_cast<int64_t>(schema.arguments().size()), stack.end()) {
  for (size_t i = 0; i < arguments.size(); i++)
    each_tensor(arguments[i], [&](const at::Tensor& t) {
      const auto* meta = deferred_meta(t);
      tensors++;
      distributed |= is_dtensor(t);
      writes |= is_written(i);
      writes_real |= is_written(i) && !meta && t.defined();
      if (!first && meta) first = meta, first_deferred = t;
    });
  for (const auto& r : schema.returns()) returns_tensors |= contains_tensors(*r.type());
}

std::optional<size_t> DeferredCall::find(const char* name) const {
  const auto index = schema.argumentIndexWithName(name);
  return index ? std::optional<size_t>(*index) : std::nullopt;
}

bool DeferredCall::is_written(size_t argument) const {
  const auto* alias = schema.arguments()[argument].alias_info();
  return alias && alias->isWrite();
}

bool DeferredCall::is_view() const {
  return returns_tensors && !writes && std::all_of(schema.returns().begin(), schema.returns().end(), [](const auto& r) {
           return r.alias_info() && !r.alias_info()->isWrite();
         });
}

bool decompose(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  for (const auto key : {c10::DispatchKey::CompositeImplicitAutograd, c10::DispatchKey::CompositeExplicitAutograd})
    if (op.hasKernelForDispatchKey(key)) return op.callBoxedForDispatchKey(key, *stack), true;
  return false;
}

}  // namespace tessera::detail::deferred
