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

thread_local constinit OpLog* current_log = nullptr;
thread_local constinit int active_scopes = 0;

struct StringViewHash : std::hash<std::string_view> {
  using is_transparent = void;
};

// Returns a permanent copy: a RecordFunction may own its name.
const char* interned(const char* name) {
  static std::mutex mutex;
  static auto* names = new std::unordered_set<std::string, StringViewHash, std::equal_to<>>;
  std::lock_guard lock(mutex);
  auto found = names->find(std::string_view(name));
  if (found == names->end()) found = names->emplace(name).first;
  return found->c_str();
}

}  // namespace

struct OpLogAccess {
  // The autograd engine reports its nodes too. These are not ops; a function may call backward.
  static bool is_op(const at::RecordFunction& function) {
    return !std::string_view(function.name()).starts_with("autograd::");
  }
  static std::unique_ptr<at::ObserverContext> begin(const at::RecordFunction& function) {
    if (current_log && is_op(function)) current_log->begin_op(function.name());
    return nullptr;
  }
  static void end(const at::RecordFunction& function, at::ObserverContext*) {
    if (current_log && is_op(function)) current_log->end_op(function.name());
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
  const auto location = current_location();
  running_.pop_back();
  add_op(location);
}

void OpLog::add_op(OpLocation location) {
  ops_.push_back(location);
  if (!expected_ || difference_ || !complete_ || !expected_->complete_) return;
  const size_t n = ops_.size() - 1;
  if (n >= expected_->ops_.size()) {
    if (!expected_->ended_) return;
    difference_ = c10::str("forward ran ", n, " differentiable ops, and recomputation also runs ", describe(location));
  } else if (expected_->ops_[n].op != location.op) {
    difference_ = c10::str("differentiable op ", n, " was ", expected_->describe(expected_->ops_[n]),
                           " in forward and is ", describe(location), " in recomputation");
  }
}

OpLocation OpLog::current_location() {
  OpLocation location;
  if (!running_.empty()) location.op = interned(running_.back());
  if (const auto* frame = innermost_module()) location.module = static_cast<int32_t>(module_index(*frame));
  return location;
}

// A linear search: a function calls few modules. Modules are compared by address, names of a ModuleNameScope by text.
size_t OpLog::module_index(const ModuleFrame& frame) {
  const bool is_module = frame.name == &path_of;
  for (size_t i = modules_.size(); i-- > 0;) {
    const auto& [module, path] = modules_[i];
    if (is_module ? module == frame.module : !module && path.name() == frame.name(frame)) return i;
  }
  modules_.emplace_back(is_module ? frame.module : nullptr, ModulePath::now());
  return modules_.size() - 1;
}

std::string OpLog::describe(const OpLocation& location) const {
  std::string text = location.op ? location.op : "an autograd::Function";
  if (location.module >= 0) text += " in module " + modules_[static_cast<size_t>(location.module)].second.name();
  return text;
}

OpLogScope::OpLogScope(OpLog* log) : before_(current_log) {
  current_log = log;
  if (!log) return;
  log->complete_ = log->complete_ && at::isRecordFunctionEnabled();
  if (active_scopes++ > 0) return;
  callback_ = at::addThreadLocalCallback(
      at::RecordFunctionCallback(&OpLogAccess::begin, &OpLogAccess::end).scopes({at::RecordScope::FUNCTION}));
}

OpLogScope::~OpLogScope() {
  if (current_log) active_scopes--;
  if (callback_) at::removeCallback(callback_);
  current_log = before_;
}

}  // namespace tessera::detail
