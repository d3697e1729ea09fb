#include "tessera/rules/detail/meta_call.h"

#include "tessera/base/error.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/List.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <string_view>

namespace tessera::rules {
namespace {

// Ops that read the storage of their argument, which a meta tensor with the sizes of a view does not have.
constexpr std::string_view kReadsStorage[] = {"aten::as_strided", "aten::as_strided_", "aten::as_strided_scatter",
                                              "aten::as_strided_copy"};

at::Tensor meta_tensor(const TensorArg& tensor, const c10::IValue& given) {
  at::Tensor meta = at::detail::empty_strided_meta(tensor.sizes, tensor.strides, tensor.dtype);
  const bool is_plain = !tensor.distributed && given.isTensor() && given.toTensor().defined();
  if (is_plain && given.toTensor().unsafeGetTensorImpl()->is_wrapped_number())
    meta.unsafeGetTensorImpl()->set_wrapped_number(true);
  return meta;
}

// An argument that is not a tensor, changed so that a factory op makes a meta tensor.
c10::IValue on_meta(const c10::Argument& argument, const c10::IValue& value) {
  if (value.isDevice()) return c10::Device(c10::kMeta);
  if (value.isGenerator() || argument.name() == "pin_memory") return {};
  return value;
}

// The arguments of the call, with a meta tensor for each tensor.
torch::jit::Stack meta_arguments(const OpQuery& query) {
  const auto& arguments = query.schema.arguments();
  torch::jit::Stack stack;
  stack.reserve(arguments.size());
  auto next = query.tensors.begin();
  for (size_t a = 0; a < arguments.size(); a++) {
    const auto& value = query.args[a];
    const auto is_next = [&] { return next != query.tensors.end() && next->arg == static_cast<int>(a); };
    if (!is_next()) {
      stack.push_back(on_meta(arguments[a], value));
    } else if (next->element < 0) {
      stack.emplace_back(meta_tensor(*next, value));
      ++next;
    } else {
      std::vector<at::Tensor> elements(value.isList() ? value.toListRef().size() : 0);
      for (; is_next(); ++next) {
        const auto element = static_cast<size_t>(next->element);
        if (element >= elements.size()) elements.resize(element + 1);
        elements[element] = meta_tensor(*next, value.isList() ? value.toListRef()[element] : c10::IValue());
      }
      if (value.isOptionalTensorList()) {
        c10::List<std::optional<at::Tensor>> list;
        for (auto& t : elements) list.push_back(t.defined() ? std::optional(t) : std::nullopt);
        stack.emplace_back(std::move(list));
      } else {
        stack.emplace_back(std::move(elements));
      }
    }
  }
  return stack;
}

// Padding ops read int[N] lists without a check of the length, also for plain tensors.
void check_list_lengths(const OpQuery& query) {
  const auto& arguments = query.schema.arguments();
  if (query.schema.name().find("_pad") == std::string::npos) return;
  for (size_t a = 0; a < arguments.size(); a++) {
    const auto wanted = arguments[a].N();
    if (!wanted || !query.args[a].isIntList()) continue;
    const auto length = static_cast<int32_t>(query.args[a].toListRef().size());
    TESSERA_CHECK(length == *wanted, UsageError, query.schema.operator_name(), ": argument '", arguments[a].name(),
                  "' has ", length, " values; it needs ", *wanted);
  }
}

OutInfo geometry(const at::Tensor& t) {
  if (!t.defined()) return {};
  return {Sizes(t.sizes()), Sizes(t.strides())};
}

// The dispatch state of a thread without autograd and modes, so that neither records the call.
c10::impl::ForceDispatchKeyGuard without_modes() {
  return {c10::DispatchKeySet(c10::DispatchKey::BackendSelect),
          c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset};
}

}  // namespace

std::optional<std::vector<OutInfo>> run_on_meta(const c10::OperatorHandle& op, const OpQuery& query, bool other_code) {
  const bool same_code = other_code || op.hasKernelForDispatchKey(c10::DispatchKey::Meta) ||
                         !op.hasKernelForDispatchKey(c10::DispatchKey::CPU);
  if (!same_code || !op.hasComputedKernelForDispatchKey(c10::DispatchKey::Meta)) return std::nullopt;
  if (std::count(std::begin(kReadsStorage), std::end(kReadsStorage), op.operator_name().name) > 0) return std::nullopt;
  check_list_lengths(query);
  auto stack = meta_arguments(query);
  try {
    const auto guard = without_modes();
    op.callBoxed(stack);
  } catch (const c10::NotImplementedError&) {  // an op inside has no meta kernel, or it would read a value
    return std::nullopt;
  }
  std::vector<OutInfo> outs;
  const auto& returns = query.schema.returns();
  for (size_t i = 0; i < stack.size() && i < returns.size(); i++) {
    if (returns[i].alias_info() && returns[i].alias_info()->isWrite()) continue;
    if (stack[i].isTensor())
      outs.push_back(geometry(stack[i].toTensor()));
    else if (stack[i].isTensorList())
      for (const at::Tensor& t : stack[i].toTensorList()) outs.push_back(geometry(t));
  }
  return outs;
}

Rule evaluate(const OpRule& rule, const c10::OperatorHandle& op, OpQuery query) {
  // A query of a foreach op has one element of each list, so the op cannot be called with it.
  if (rule.lists == ListMode::Joint) query.dense_outs = run_on_meta(op, query);
  return rule.fn(query);
}

}  // namespace tessera::rules
