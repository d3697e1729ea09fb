#include "tessera/tensor_parallel/detail/check_recorder.h"

#include "tessera/nn/detail/hookable.h"

#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>

#include <functional>
#include <numeric>
#include <string_view>

namespace tessera {
namespace {

thread_local constinit CallRecord* active_record = nullptr;
thread_local constinit int running_ops = 0;

Tensors copies_of(const Tensors& tensors) {
  at::NoGradGuard no_grad;
  Tensors copies;
  for (const auto& t : tensors) copies.push_back(t.defined() ? t.detach().clone() : t);
  return copies;
}

std::vector<int64_t> integers_of(const c10::IValue& list) {
  std::vector<int64_t> integers;
  if (list.isList())
    for (const c10::IValue& each : list.toListRef())
      if (each.isInt()) integers.push_back(each.toInt());
  return integers;
}

std::unique_ptr<at::ObserverContext> begin_op(const at::RecordFunction& function) {
  if (running_ops++ > 0 || !active_record) return nullptr;
  const std::string_view name = function.name();
  if (name != "aten::view" && name != "aten::reshape") return nullptr;
  const auto inputs = function.inputs();
  if (inputs.size() < 2 || !inputs[0].isTensor()) return nullptr;
  active_record->views.push_back(
      {active_record->running_path(), inputs[0].toTensor().sizes().vec(), integers_of(inputs[1])});
  return nullptr;
}
void end_op(const at::RecordFunction&, at::ObserverContext*) { running_ops--; }

}  // namespace

std::vector<int64_t> ViewCall::resolved() const {
  auto sizes = to;
  const auto count = [](const std::vector<int64_t>& s) {
    return std::accumulate(s.begin(), s.end(), int64_t{1}, std::multiplies<>());
  };
  for (auto& size : sizes) {
    if (size != -1) continue;
    size = 1;
    const auto others = count(sizes);
    size = others > 0 ? count(from) / others : 0;
  }
  return sizes;
}

std::shared_ptr<CallRecord> record_calls(Module& root) {
  auto record = std::make_shared<CallRecord>();
  for (const auto& path : root.named_modules().keys()) {
    if (!can_be_hooked(root, path)) continue;
    const auto module = hookable(root, path);
    register_forward_pre_hook(*module,
                              [record, path](Module&, const Tensors& inputs) {
                                if (!record->active) return;
                                record->events.push_back({path, false, copies_of(inputs), inputs});
                                record->running.push_back(path);
                              },
                              {.prepend = true});
    register_forward_hook(*module, [record, path](Module&, const Tensors&, const Tensors& outputs) {
      if (!record->active) return;
      record->running.pop_back();
      record->events.push_back({path, true, copies_of(outputs), outputs});
    });
  }
  return record;
}

RecordScope::RecordScope(CallRecord& record) : record_(record), before_(active_record) {
  active_record = &record;
  record.active = true;
  running_ops = 0;
  callback_ = at::addThreadLocalCallback(
      at::RecordFunctionCallback(&begin_op, &end_op).needsInputs(true).scopes({at::RecordScope::FUNCTION}));
}
RecordScope::~RecordScope() {
  at::removeCallback(callback_);
  record_.active = false;
  active_record = before_;
}

}  // namespace tessera
