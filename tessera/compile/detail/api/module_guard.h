#pragma once
#include "tessera/compile/detail/api/tensor_guard.h"
#include "tessera/compile/detail/trace/call_arguments.h"

#include <torch/nn/module.h>

#include <memory>
#include <string>
#include <typeinfo>
#include <vector>

namespace tessera {
class HookPoint;
}

namespace tessera::compiler {

// The state of a module tree that a program is specialized for, as one flat table:
//   the tree                  which submodules, parameters and buffers each module has registered. Weak pointers tell a
//                             submodule from a later one at the same address
//   parameters and buffers    identity and TensorGuard. The table holds them, so an address is never reused.
//   modes                     train or eval
//   hooks                     module hooks of Holders
//   members                   all bytes of the object outside of its torch::nn::Module part
// is_complete() is false if members of your classes can change unseen: elements of a std::vector, a long string, what a
// pointer points to, or an object whose size is unknown because make_shared did not create it.
class ModuleGuard {
 public:
  ModuleGuard(const torch::nn::Module& root, CallArguments::ModuleObject object);
  // The check is a loop over the table. `why`: if not null, gets the first difference.
  bool holds(const torch::nn::Module& root, std::string* why = nullptr) const;
  // Adds the memory that holds(root) reads if `root` is the module that was given. False if that is not known.
  bool add_to(GuardSnapshot& snapshot) const;
  const torch::nn::Module* root() const { return entries_.front().module; }
  // Excludes members that a run of the program has changed itself. Call it after the first run.
  void exclude_changed_members();
  bool is_complete() const { return complete_; }
  // The bytes of a module that make_shared has created. The size is 0 for other objects.
  static CallArguments::ModuleObject object_of(const std::shared_ptr<torch::nn::Module>& pointer);

 private:
  struct Entry {
    const torch::nn::Module* module;
    std::string name;
    bool training;
    const HookPoint* hook_point;  // null: the module cannot have hooks
    uint64_t hooks;               // hash of the ids of its hooks
    size_t children, tensors;     // numbers of entries in the lists below
  };
  struct Members {
    const char* begin;
    std::string bytes, name;
    bool of_own_class;               // not a class of LibTorch
    size_t lists = 0;                // entries behind this one with elements of vectors among these members
    std::vector<bool> ignored = {};  // by byte; empty: none
    bool hold() const;
  };
  using WeakModule = std::weak_ptr<const torch::nn::Module>;
  void add(const torch::nn::Module& module, CallArguments::ModuleObject object, const std::string& name);
  void add_members(const void* begin, size_t size, const std::string& name, bool of_own_class);
  void add_object(const torch::nn::Module& module, CallArguments::ModuleObject object, const std::string& name,
                  bool of_own_class);
  bool points_to_unseen_memory(const Members& members) const;

  std::vector<Entry> entries_;  // pre-order: a submodule is looked at only if its parent still has it
  WeakModule root_;             // empty: no shared_ptr owns it
  const std::type_info* root_type_;
  std::vector<WeakModule> children_;
  std::vector<std::pair<at::Tensor, TensorGuard>> tensors_;
  std::vector<Members> members_;
  bool complete_ = true;
};

// The bytes of a module that has a class of torch::nn, without its hooks. The size is 0 for other classes.
CallArguments::ModuleObject find_torch_members(const torch::nn::Module& module);
// The elements of vectors among the options of such a module.
std::vector<CallArguments::ModuleObject> find_torch_lists(const torch::nn::Module& module);

}  // namespace tessera::compiler
