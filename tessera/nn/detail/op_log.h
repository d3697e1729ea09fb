#pragma once
#include "tessera/nn/detail/module_path.h"

#include <c10/util/SmallVector.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

// What a checkpointed function did, as far as its gradient depends on it, so that forward and recomputation can be
// compared op by op and a difference has a name.
//
//   y = linear(x)      step 0: aten::linear        an op that the function called itself, and that left a node in the
//   y = y + 1          step 1: aten::add           graph. What ops call inside of them is not a step: autocast may
//   mask = ones(4)     no step: no gradient        cast a weight in forward and find it cast in recomputation.
//   y = relu(y)        step 2: aten::relu
//
// Ops are seen through LibTorch's RecordFunction, as a profiler sees them.
namespace tessera::detail {

struct Place {
  const char* op = nullptr;  // interned, so equal names are equal pointers; null: no op of the dispatcher
  int32_t module = -1;       // an index into the trail's modules; -1: outside of modules
};

class OpLog {
 public:
  // `expected`: what the steps are compared with as they come.
  explicit OpLog(const OpLog* expected = nullptr) : expected_(expected) {}

  // No more steps will come: whoever takes more differs.
  void end() { ended_ = true; }

  // The innermost op and module that run now.
  Place here();
  std::string describe(const Place& place) const;  // "aten::mm in module GPT.h.0"

  size_t steps() const { return steps_.size(); }
  // Was everything seen? Not if RecordFunction was switched off: then ops are not to be compared.
  bool complete() const { return complete_; }

  // How the steps differ from the expected ones, as a sentence; nothing if they do not so far.
  const std::optional<std::string>& difference() const { return difference_; }

 private:
  friend struct OpLogAccess;
  friend class OpLogScope;
  void begin_op(const char* name);
  void end_op(const char* name);
  void add_step(Place place);
  size_t module_index(const ModuleFrame& frame);

  const OpLog* expected_;
  std::optional<std::string> difference_;
  std::vector<Place> steps_;
  std::vector<std::pair<const void*, ModulePath>> modules_;  // null: not a module, but a name given in full
  c10::SmallVector<const char*, 8> running_;                 // names of the ops that run, outermost first
  uint64_t nodes_before_ = 0;                                // made on this thread when the outermost began
  bool ended_ = false;
  bool complete_ = true;
};

// Follows what this thread does while alive; a trail that was followed before rests meanwhile. Null: follows nothing.
class OpLogScope {
 public:
  explicit OpLogScope(OpLog* trail);
  ~OpLogScope();
  OpLogScope(const OpLogScope&) = delete;

 private:
  OpLog* before_;
  uint64_t callback_ = 0;
};

}  // namespace tessera::detail
