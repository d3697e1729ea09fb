#include "tessera/debug/comm_debug_mode.h"

#include "tessera/base/detail/module_name.h"
#include "tessera/base/error.h"
#include "tessera/redistribute/detail/execute.h"

namespace tessera {

CommDebugMode::CommDebugMode() { enter(); }

CommDebugMode::~CommDebugMode() {
  if (open_) exit();
}

void CommDebugMode::enter() {
  TESSERA_CHECK(!open_, UsageError,
                "CommDebugMode::enter(): this mode is already open; the constructor enters it. "
                "Call exit() first, or reset() to set the counts to zero");
  reset();
  outer_ = std::exchange(detail::op_observer(), this);
  comm_scope_.emplace(this);
  open_ = true;
}

void CommDebugMode::exit() {
  TESSERA_CHECK(open_, UsageError, "CommDebugMode::exit(): this mode is not open");
  TESSERA_CHECK(
      detail::op_observer() == this, UsageError,
      "CommDebugMode::exit(): a mode that was opened later or on another thread is still open; exit that one first");
  comm_scope_.reset();
  detail::op_observer() = outer_;
  outer_ = nullptr;
  open_ = false;
}

void CommDebugMode::reset() {
  counts_ = {};
  by_module_.clear();
  bytes_.clear(), bytes_by_module_.clear();
  implicit_.clear();
  tree_.clear();
}

int64_t CommDebugMode::implicit_redistributions() const {
  int64_t total = 0;
  for (const auto& [op, count] : implicit_) total += count;
  return total;
}

void CommDebugMode::on_post(const comm::Record& record) {  // outer modes have their own observer
  if (!record.counted()) return;
  counts_.add(record.kind, record.family);
  const auto module = running_module();
  by_module_[module].add(record.kind, record.family);
  bytes_by_module_[module] += record.bytes;
  bytes_[record.group] += record.bytes;
  tree_.collective(record);
}

void CommDebugMode::begin_op(const propagate::OpEntry& entry, c10::ArrayRef<const TensorSpec*> in) {
  tree_.begin_op(entry.name, in);
  if (outer_) outer_->begin_op(entry, in);
}

void CommDebugMode::redistributes(int tensor, const TensorSpec& from, const TensorSpec& to, bool is_explicit) {
  if (!is_explicit && redistribute::plan_between(from, to).communicates()) implicit_[std::string(tree_.current_op())]++;
  tree_.begin_redistribution(tensor, from, to, is_explicit);
  if (outer_) outer_->redistributes(tensor, from, to, is_explicit);
}

void CommDebugMode::redistributed() {
  tree_.end_redistribution();
  if (outer_) outer_->redistributed();
}

void CommDebugMode::end_op(c10::ArrayRef<const TensorSpec*> out) {
  tree_.end_op(out);
  if (outer_) outer_->end_op(out);
}

}  // namespace tessera
