#include "tessera/nn/detail/op_log.h"

#include "tessera/base/detail/module_name.h"
#include "tessera/dtensor/detail/dispatch.h"
#include "tessera/nn/module_tree.h"

#include <ATen/SequenceNumber.h>
#include <ATen/record_function.h>
#include <c10/util/StringUtil.h>

#include <functional>
#include <mutex>
#include <string_view>
#include <unordered_set>

namespace tessera::detail {
namespace {

thread_local constinit OpLog* followed = nullptr;
thread_local constinit int scopes_following = 0;

struct TextHash : std::hash<std::string_view> {
  using is_transparent = void;
};

// A name may lie in the RecordFunction itself and die with it.
const char* interned(const char* name) {
  static std::mutex mutex;
  static auto* names = new std::unordered_set<std::string, TextHash, std::equal_to<>>;
  std::lock_guard lock(mutex);
  auto found = names->find(std::string_view(name));
  if (found == names->end()) found = names->emplace(name).first;
  return found->c_str();
}

}  // namespace

struct OpLogAccess {
  // The engine's own reports are no ops: a function may call backward.
  static bool is_op(const at::RecordFunction& function) {
    return !std::string_view(function.name()).starts_with("autograd::");
  }
  static std::unique_ptr<at::ObserverContext> begin(const at::RecordFunction& function) {
    if (followed && is_op(function)) followed->begin_op(function.name());
    return nullptr;
  }
  static void end(const at::RecordFunction& function, at::ObserverContext*) {
    if (followed && is_op(function)) followed->end_op(function.name());
  }
};

void OpLog::begin_op(const char* name) {
  if (running_.empty()) nodes_before_ = at::sequence_number::peek();
  running_.push_back(name);
}

void OpLog::end_op(const char* name) {
  if (running_.empty()) return;
  running_.pop_back();
  if (!running_.empty() || at::sequence_number::peek() == nodes_before_ || in_backward()) return;
  running_.push_back(name);
  const auto place = here();
  running_.pop_back();
  add_step(place);
}

void OpLog::add_step(Place place) {
  steps_.push_back(place);
  if (!expected_ || difference_ || !complete_ || !expected_->complete_) return;
  const size_t n = steps_.size() - 1;
  if (n >= expected_->steps_.size()) {
    if (!expected_->ended_) return;
    difference_ = c10::str("forward ran ", n, " ops that have a gradient, recomputation also runs ", describe(place));
  } else if (expected_->steps_[n].op != place.op) {
    difference_ =
        c10::str("of the ops that have a gradient, number ", n, " was ", expected_->describe(expected_->steps_[n]),
                 " in forward and is ", describe(place), " in recomputation");
  }
}

Place OpLog::here() {
  Place place;
  if (!running_.empty()) place.op = interned(running_.back());
  if (const auto* frame = innermost_module()) place.module = static_cast<int32_t>(module_index(*frame));
  return place;
}

// Modules go by address, and a function calls few of them. A name given in full lies anywhere, so it goes by itself.
size_t OpLog::module_index(const ModuleFrame& frame) {
  const bool is_module = frame.name == &path_of;
  for (size_t i = modules_.size(); i-- > 0;) {
    const auto& [module, path] = modules_[i];
    if (is_module ? module == frame.module : !module && path.name() == frame.name(frame)) return i;
  }
  modules_.emplace_back(is_module ? frame.module : nullptr, ModulePath::now());
  return modules_.size() - 1;
}

std::string OpLog::describe(const Place& place) const {
  std::string text = place.op ? place.op : "an autograd::Function";
  if (place.module >= 0) text += " in module " + modules_[static_cast<size_t>(place.module)].second.name();
  return text;
}

OpLogScope::OpLogScope(OpLog* trail) : before_(followed) {
  followed = trail;
  if (!trail) return;
  trail->complete_ = trail->complete_ && at::isRecordFunctionEnabled();
  if (scopes_following++ > 0) return;
  callback_ = at::addThreadLocalCallback(
      at::RecordFunctionCallback(&OpLogAccess::begin, &OpLogAccess::end).scopes({at::RecordScope::FUNCTION}));
}

OpLogScope::~OpLogScope() {
  if (followed) scopes_following--;
  if (callback_) at::removeCallback(callback_);
  followed = before_;
}

}  // namespace tessera::detail
