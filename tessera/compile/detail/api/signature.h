#pragma once
#include "tessera/compile/detail/api/module_guard.h"
#include "tessera/compile/detail/api/tensor_guard.h"
#include "tessera/compile/detail/api/thread_state.h"
#include "tessera/compile/detail/trace/call_arguments.h"

#include <string>
#include <vector>

namespace tessera::compiler {

// The properties of a call that a program is specialized for, as the guards of torch.compile: thread state, module
// trees, optimizers, tensors, and every other leaf of the arguments. A cached program runs only if its signature holds
// for the new call. Build it after tracing: one-time setup in the step (lazy state, hooks of a reducer) is over then.
class Signature {
 public:
  Signature() = default;
  // `number_is_key`: by number of the call; the others are inputs of the program.
  Signature(const CallArguments& arguments, std::vector<bool> number_is_key);

  // `why`: if not null, gets the first difference, as "argument 0 is f32[64, 10], it was f32[32, 10]".
  // `state_holds`: the guards of modules and leaves are known to hold.
  bool holds(const CallArguments& arguments, const ThreadState& now, std::string* why = nullptr,
             bool state_holds = false) const;
  // Are the modules and leaves of the arguments the same objects?
  bool has_same_objects(const CallArguments& arguments) const;
  // Adds the memory that the guards of these read. False if that is not known.
  bool add_to(GuardSnapshot& snapshot) const;
  // Call it after the first run of the program.
  void exclude_changed_members() {
    for (auto& module : modules_) module.exclude_changed_members();
  }
  // False if a submodule has members that the signature cannot contain.
  bool is_complete() const;
  const std::vector<bool>& number_is_key() const { return number_is_key_; }

 private:
  struct ArgumentGuard {
    TensorGuard tensor;
    int aliases = -1;         // index of an earlier tensor with the same storage; -1: none
    int64_t alias_bytes = 0;  // from the first byte of that tensor to the first byte of this one
  };
  bool tensors_hold(const CallArguments& arguments, std::string* why, bool leaves_hold) const;
  bool leaves_hold(const CallArguments& arguments, std::string* why) const;

  ThreadState thread_state_;
  std::vector<ModuleGuard> modules_;
  std::vector<std::pair<const OptimizerAccess*, uint64_t>> optimizers_;  // with generation, which is never reused
  std::vector<std::pair<at::Tensor, TensorGuard>> leaves_;
  std::vector<ArgumentGuard> tensors_;
  std::vector<ArgumentLeaf> others_;
  std::vector<double> numbers_;
  std::vector<bool> number_is_key_;
  std::vector<std::string> strings_;
};

}  // namespace tessera::compiler
