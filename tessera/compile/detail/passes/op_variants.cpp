#include "tessera/compile/detail/passes/op_variants.h"

#include "tessera/compile/detail/ir/op_table.h"
#include "tessera/compile/detail/replay/boxed_arguments.h"
#include "tessera/tracing/op_mode.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/enum_tag.h>
#include <ATen/core/grad_mode.h>
#include <ATen/core/stack.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/ones.h>

#include <algorithm>

namespace tessera::compiler {
namespace {

std::optional<c10::OperatorHandle> find_schema(const std::string& name, const std::string& overload) {
  return c10::Dispatcher::singleton().findSchema({name, overload});
}

// True if both schemas have the same arguments and `in_place` writes only the first.
bool are_variants(const c10::FunctionSchema& functional, const c10::FunctionSchema& in_place) {
  const auto &a = functional.arguments(), &b = in_place.arguments();
  if (functional.is_mutable() || a.size() != b.size() || functional.returns().size() != 1) return false;
  for (size_t i = 0; i < a.size(); i++) {
    const bool written = b[i].alias_info() && b[i].alias_info()->isWrite();
    if (a[i].name() != b[i].name() || *a[i].type() != *b[i].type() || written != (i == 0)) return false;
  }
  return functional.returns()[0].alias_info() == nullptr;
}

// Calls the op with tensors that `make` creates. None if the op throws.
std::optional<Tensors> call_with(const Program& program, const Node& node,
                                 const std::function<at::Tensor(const Type&)>& make) {
  Tensors values;  // of the arguments, renumbered
  auto renumbered = node;
  renumbered.replace_reads([&](ValueId id) {
    values.push_back(make(program[id].type));
    return static_cast<ValueId>(values.size() - 1);
  });
  torch::jit::Stack stack;
  try {
    for (size_t i = 0; i < node.args.size(); i++) {
      if (std::holds_alternative<RuntimeScalar>(node.args[i]))
        stack.emplace_back(1.0);
      else
        stack.push_back(boxed(program, renumbered.args[i], node.schema().arguments()[i], values));
    }
    node.op.callBoxed(stack);
  } catch (const c10::Error&) {
    return {};
  }
  Tensors found;
  for (const auto& result : stack) {
    if (result.isTensor()) found.push_back(result.toTensor());
    if (result.isTensorList())
      for (const at::Tensor& t : result.toTensorList()) found.push_back(t);
  }
  return found;
}

}  // namespace

std::optional<c10::OperatorHandle> in_place_variant(const c10::OperatorHandle& op) {
  const auto& name = op.operator_name();
  const auto found = find_schema(name.name + "_", name.overload_name);
  return found && are_variants(op.schema(), found->schema()) ? found : std::nullopt;
}

std::optional<c10::OperatorHandle> functional_variant(const c10::OperatorHandle& op) {
  const auto& name = op.operator_name();
  if (!name.name.ends_with("_") || name.name.ends_with("__")) return {};
  const auto found = find_schema(name.name.substr(0, name.name.size() - 1), name.overload_name);
  return found && are_variants(found->schema(), op.schema()) ? found : std::nullopt;
}

bool is_pointwise(const c10::OperatorHandle& op) {
  const auto tags = op.getTags();
  return std::find(tags.begin(), tags.end(), at::Tag::pointwise) != tags.end();
}

std::optional<std::vector<Type>> result_types(const Program& program, const Node& node) {
  const OpModesOff modes_off;
  const at::AutoDispatchBelowADInplaceOrView below;
  const at::NoGradGuard no_grad;
  const Type* first = nullptr;
  bool same_layout = true;
  node.each_read([&](ValueId id) {
    const auto& type = program[id].type;
    if (!first) first = &type;
    same_layout &= type.sizes.empty() || (type.sizes == first->sizes && type.strides == first->strides);
  });
  if (!first) return {};
  auto found = call_with(program, node, [](const Type& type) {
    return at::empty_strided(type.sizes, type.strides, at::TensorOptions(type.dtype).device(at::kMeta));
  });
  const bool from_one_element = !found && same_layout && first->is_contiguous() && is_pointwise(node.op);
  if (from_one_element) found = call_with(program, node, [](const Type& type) { return at::ones({1}, type.dtype); });
  if (!found) return {};
  std::vector<Type> types;
  for (const auto& t : *found) {
    types.push_back(from_one_element ? *first : Type{});
    if (t.defined() && !from_one_element) types.back() = Type::of(t);
    if (t.defined()) types.back().dtype = t.scalar_type();
    types.back().device = first->device;
  }
  return types;
}

}  // namespace tessera::compiler
