#include "tessera/testing/recorder.h"

#include "tessera/base/error.h"
#include "tessera/base/tracer_key.h"
#include "tessera/dtensor/meta.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/List.h>
#include <torch/library.h>

#include <mutex>
#include <unordered_map>

namespace tessera::testing {

using c10::IValue;
using torch::jit::Stack;

namespace {

thread_local Recorder* current = nullptr;

bool has_dtensor(const IValue& v) {
  if (v.isTensor()) return is_dtensor(v.toTensor());
  if (!v.isList()) return false;
  for (const auto& x : v.toListRef())
    if (has_dtensor(x)) return true;
  return false;
}

using Replaced = std::unordered_map<const c10::TensorImpl*, at::Tensor>;

at::Tensor replacement(const at::Tensor& t, const Replaced& made) {
  const auto found = made.find(t.unsafeGetTensorImpl());
  return found == made.end() ? t : found->second;
}

IValue substitute(const IValue& v, const Replaced& made) {
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

void note_results(const IValue& before, const IValue& after, Replaced& made) {
  if (before.isTensor()) {
    made[before.toTensor().unsafeGetTensorImpl()] = after.toTensor();
  } else if (before.isTensorList()) {
    const auto old = before.toTensorVector(), now = after.toTensorVector();
    for (size_t i = 0; i < old.size(); i++) made[old[i].unsafeGetTensorImpl()] = now[i];
  }
}

}  // namespace

struct RecorderAccess {
  static void record(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
    const auto below = keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kTracerKey);
    const size_t first = stack->size() - op.schema().arguments().size();
    for (size_t i = first; i < stack->size(); i++)
      if (has_dtensor((*stack)[i])) return op.redispatchBoxed(below, stack);  // its pieces come here again
    std::vector<IValue> args(stack->begin() + static_cast<int64_t>(first), stack->end());
    {
      c10::impl::ExcludeDispatchKeyGuard not_again(kTracerKey);
      op.redispatchBoxed(below, stack);
    }
    std::vector<IValue> results(stack->end() - static_cast<int64_t>(op.schema().returns().size()), stack->end());
    if (current) current->records_.push_back({op, std::move(args), std::move(results)});
  }
};

Recorder::Recorder() {
  static std::once_flag once;
  std::call_once(once, [] {
    auto* library = new torch::Library(torch::Library::IMPL, "_", kTracerKey, __FILE__, __LINE__);
    library->fallback(torch::CppFunction::makeFromBoxedFunction<&RecorderAccess::record>());
  });
  TESSERA_CHECK(!current, UsageError, "a Recorder is already at work in this thread");
  current = this;
  c10::impl::tls_set_dispatch_key_included(kTracerKey, true);
}

Recorder::~Recorder() { stop(); }

void Recorder::stop() {
  if (std::exchange(stopped_, true)) return;
  c10::impl::tls_set_dispatch_key_included(kTracerKey, false);
  current = nullptr;
}

void Recorder::replay() const {
  at::AutoDispatchBelowADInplaceOrView below;
  Replaced made;
  for (const auto& record : records_) {
    Stack stack;
    for (const auto& v : record.args) stack.push_back(substitute(v, made));
    record.op.callBoxed(stack);
    for (size_t i = 0; i < record.results.size(); i++) note_results(record.results[i], stack[i], made);
  }
}

std::vector<std::string> Recorder::ops() const {
  std::vector<std::string> names;
  for (const auto& record : records_) names.push_back(toString(record.op.operator_name()));
  return names;
}

}  // namespace tessera::testing
