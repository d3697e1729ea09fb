#include "tessera/testing/detail/recorder.h"

#include "tessera/base/error.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/List.h>

#include <unordered_map>

namespace tessera::testing {

using c10::IValue;
using torch::jit::Stack;

namespace {

thread_local Recorder* current = nullptr;

using Replacements = std::unordered_map<const c10::TensorImpl*, at::Tensor>;

at::Tensor replacement(const at::Tensor& t, const Replacements& made) {
  const auto found = made.find(t.unsafeGetTensorImpl());
  return found == made.end() ? t : found->second;
}

IValue substitute(const IValue& v, const Replacements& made) {
  if (v.isTensor()) return replacement(v.toTensor(), made);
  if (v.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& t : v.toTensorList()) list.push_back(replacement(t, made));
    return list;
  }
  if (v.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& t : v.toOptionalTensorList())
      list.push_back(t ? std::optional(replacement(*t, made)) : std::nullopt);
    return list;
  }
  return v;
}

void add_replacements(const IValue& before, const IValue& after, Replacements& made) {
  if (before.isTensor()) {
    made[before.toTensor().unsafeGetTensorImpl()] = after.toTensor();
  } else if (before.isTensorList()) {
    const auto old = before.toTensorVector(), now = after.toTensorVector();
    for (size_t i = 0; i < old.size(); i++) made[old[i].unsafeGetTensorImpl()] = now[i];
  }
}

}  // namespace

void Recorder::run(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  if (keys.has_backend(c10::BackendComponent::PrivateUse3Bit)) return next(op, keys, stack);  // local ops follow
  const auto first = static_cast<int64_t>(stack->size() - op.schema().arguments().size());
  std::vector<IValue> args(stack->begin() + first, stack->end());
  next(op, keys, stack);
  std::vector<IValue> results(stack->end() - static_cast<int64_t>(op.schema().returns().size()), stack->end());
  records_.push_back({op, std::move(args), std::move(results)});
}

Recorder::Recorder() {
  TESSERA_CHECK(!current, UsageError, "a Recorder is already alive on this thread");
  current = this;
  on_.emplace(static_cast<OpMode&>(*this));
}

Recorder::~Recorder() { stop(); }

void Recorder::stop() {
  if (!on_) return;
  on_.reset();
  current = nullptr;
}

void Recorder::replay() const {
  at::AutoDispatchBelowADInplaceOrView below;
  Replacements made;
  for (const auto& record : records_) {
    Stack stack;
    for (const auto& v : record.args) stack.push_back(substitute(v, made));
    record.op.callBoxed(stack);
    for (size_t i = 0; i < record.results.size(); i++) add_replacements(record.results[i], stack[i], made);
  }
}

std::vector<std::string> Recorder::ops() const {
  std::vector<std::string> names;
  for (const auto& record : records_) names.push_back(toString(record.op.operator_name()));
  return names;
}

}  // namespace tessera::testing
