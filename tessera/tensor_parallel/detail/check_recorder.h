#pragma once
#include "tessera/nn/hooks.h"

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

// What one forward of a model computes, module by module.
namespace tessera {

// The tensors that enter or leave one call of a module.
struct CallEvent {
  std::string path;  // of the module; "" is the root
  bool is_output = false;
  Tensors values;   // copies
  Tensors tensors;  // the tensors themselves, for their gradients
};

// A call of view or reshape by the code of a module. Ops inside of ops do not count.
struct ViewCall {
  std::string path;                       // of the running module
  std::vector<int64_t> from, to;          // the sizes of the tensor, and the argument with its -1
  std::vector<int64_t> resolved() const;  // `to` without -1
};

struct CallRecord {
  std::vector<CallEvent> events;  // in order of execution
  std::vector<ViewCall> views;
  std::vector<std::string> running;  // the modules that run, innermost last; after an error: where it happened
  bool active = false;

  std::string running_path() const { return running.empty() ? std::string() : running.back(); }
};

// Adds hooks to all modules of `root` that can have some, which write to the returned record while it is active. The
// hooks see the inputs before other hooks, and the outputs after them.
std::shared_ptr<CallRecord> record_calls(Module& root);

// Makes a record active in this scope.
class RecordScope {
 public:
  explicit RecordScope(CallRecord& record);
  ~RecordScope();
  RecordScope(const RecordScope&) = delete;

 private:
  CallRecord& record_;
  CallRecord* before_;
  uint64_t callback_;
};

}  // namespace tessera
