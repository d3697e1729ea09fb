#pragma once
#include "tessera/nn/detail/module_path.h"

#include <c10/util/SmallVector.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

// The differentiable ops of a checkpointed function, in order. Forward and recomputation each write a log. The
// comparison of both finds the first op that differs.
//
//   y = linear(x)      op 0: aten::linear        The log has ops that the function called directly and that created an
//   y = y + 1          op 1: aten::add           autograd node. Ops inside ops are not logged: autocast may cast a
//   mask = ones(4)     not logged                weight in forward and find it cached in recomputation.
//   y = relu(y)        op 2: aten::relu
//
// LibTorch's RecordFunction reports the ops, as it does for the profiler.
namespace tessera::detail {

struct OpLocation {
  const char* op = nullptr;  // interned: equal names are equal pointers; null: not an op of the dispatcher
  int32_t module = -1;       // an index into the modules of the log; -1: outside of modules
};

class OpLog {
 public:
  // Compares each new op with `expected`, if it is not null.
  explicit OpLog(const OpLog* expected = nullptr) : expected_(expected) {}

  // Marks the log as finished: a log that is compared with it and has more ops differs.
  void end() { ended_ = true; }

  // The innermost running op and module.
  OpLocation current_location();
  std::string describe(const OpLocation& location) const;  // "aten::mm in module GPT.h.0"

  size_t size() const { return ops_.size(); }
  // False if RecordFunction was disabled, so ops are missing. Incomplete logs are not compared.
  bool complete() const { return complete_; }

  // A sentence about the first difference to the expected log; nullopt if the logs are equal so far.
  const std::optional<std::string>& difference() const { return difference_; }

 private:
  friend struct OpLogAccess;
  friend class OpLogScope;
  void begin_op(const char* name);
  void end_op(const char* name);
  void add_op(OpLocation location);
  size_t module_index(const ModuleFrame& frame);

  const OpLog* expected_;
  std::optional<std::string> difference_;
  std::vector<OpLocation> ops_;
  std::vector<std::pair<const void*, ModulePath>> modules_;  // null: a ModuleNameScope, not a module
  c10::SmallVector<const char*, 8> running_;                 // the names of the running ops, outermost first
  uint64_t nodes_before_ = 0;                                // autograd nodes of this thread before the outermost op
  bool ended_ = false;
  bool complete_ = true;
};

// In this scope, the ops of this thread go to `log` instead of the log of an outer scope. Null: they are not logged.
class OpLogScope {
 public:
  explicit OpLogScope(OpLog* log);
  ~OpLogScope();
  OpLogScope(const OpLogScope&) = delete;

 private:
  OpLog* before_;
  uint64_t callback_ = 0;
};

}  // namespace tessera::detail
