#include "tessera/compile/detail/api/module_guard.h"

#include "tessera/base/detail/hash.h"
#include "tessera/nn/hooks.h"

#include <dlfcn.h>
#include <malloc.h>

#include <algorithm>
#include <cstring>

namespace tessera::compiler {
namespace {

// Access to the registered tensors and submodules of a module without a copy. named_parameters() and children() build
// new containers, which takes longer than the check itself.
using TensorDict = torch::OrderedDict<std::string, at::Tensor>;
using ModuleDict = torch::OrderedDict<std::string, std::shared_ptr<torch::nn::Module>>;

template <class Tag, typename Tag::type member>
struct MemberAccess {
  friend typename Tag::type member_of(Tag) { return member; }
};
struct ParametersOf {
  using type = TensorDict torch::nn::Module::*;
  friend type member_of(ParametersOf);
};
struct BuffersOf {
  using type = TensorDict torch::nn::Module::*;
  friend type member_of(BuffersOf);
};
struct ChildrenOf {
  using type = ModuleDict torch::nn::Module::*;
  friend type member_of(ChildrenOf);
};
struct TrainingFlagOf {
  using type = bool torch::nn::Module::*;
  friend type member_of(TrainingFlagOf);
};
// An explicit instantiation may name private members.
template struct MemberAccess<ParametersOf, &torch::nn::Module::parameters_>;
template struct MemberAccess<BuffersOf, &torch::nn::Module::buffers_>;
template struct MemberAccess<ChildrenOf, &torch::nn::Module::children_>;
template struct MemberAccess<TrainingFlagOf, &torch::nn::Module::is_training_>;

const TensorDict& parameters_of(const torch::nn::Module& m) { return m.*member_of(ParametersOf()); }
const TensorDict& buffers_of(const torch::nn::Module& m) { return m.*member_of(BuffersOf()); }
const ModuleDict& children_of(const torch::nn::Module& m) { return m.*member_of(ChildrenOf()); }

uint64_t hash_of_hooks(const HookPoint* point) {
  if (!point || !point->hooks()) return 0;
  const auto& hooks = *point->hooks();
  uint64_t hash = 1;
  size_t count = 0;
  const auto add = [&](const auto& list) {
    hash = hash_combine(hash, uint64_t{2});
    for (const auto& entry : list.entries()) hash = hash_combine(hash, entry->id), count++;
  };
  add(hooks.forward_pre), add(hooks.forward), add(hooks.around), add(hooks.backward_pre), add(hooks.backward);
  return count == 0 ? 0 : hash;
}

// Do both belong to one owner? Unlike an address, an owner is not reused while a weak pointer exists.
template <class A, class B>
bool same_owner(const A& a, const B& b) {
  return !a.owner_before(b) && !b.owner_before(a);
}

// The two words of a shared_ptr: the object, and the block with its counts.
struct SharedWords {
  const char *object, *counts;
};
SharedWords words_of(const std::shared_ptr<torch::nn::Module>& pointer) {
  static_assert(sizeof(pointer) == sizeof(SharedWords));
  SharedWords words{};
  std::memcpy(static_cast<void*>(&words), static_cast<const void*>(&pointer), sizeof(words));
  return words;
}

}  // namespace

// make_shared puts the object directly behind its two counts. The block ends where the object ends, or a few bytes
// later.
CallArguments::ModuleObject ModuleGuard::object_of(const std::shared_ptr<torch::nn::Module>& pointer) {
#ifdef __GLIBCXX__
  constexpr size_t kCounts = 16;
  const auto* counts = words_of(pointer).counts;
  const auto* object = static_cast<const char*>(dynamic_cast<const void*>(pointer.get()));
  if (!counts || object != counts + kCounts) return {};
  // NOLINTNEXTLINE(cppcoreguidelines-pro-type-const-cast): the function does not write
  return {object, malloc_usable_size(const_cast<char*>(counts)) - kCounts};
#else
  return {};
#endif
}

ModuleGuard::ModuleGuard(const torch::nn::Module& root, CallArguments::ModuleObject object)
    : root_(root.weak_from_this()), root_type_(&typeid(root)) {
  add(root, object, "");
  for (const auto& each : members_)
    if (each.of_own_class && points_to_unseen_memory(each)) complete_ = false;
}

// The members before and after the torch::nn::Module part of the object. The first ones after it can be in the padding
// behind its last member, is_training_.
void ModuleGuard::add_object(const torch::nn::Module& module, CallArguments::ModuleObject object,
                             const std::string& name, bool of_own_class) {
  if (object.size == 0) {
    complete_ = false;
    return;
  }
  const auto* begin = static_cast<const char*>(object.begin);
  const auto* base = reinterpret_cast<const char*>(&module);
  const auto* base_end = reinterpret_cast<const char*>(&(module.*member_of(TrainingFlagOf()))) + 1;
  add_members(begin, static_cast<size_t>(base - begin), name, of_own_class);
  add_members(base_end, static_cast<size_t>(begin + object.size - base_end), name, of_own_class);
}

// Does a word of the members look like a pointer to memory that the guard does not contain? Known are the object
// itself (a short string), submodules, parameters, buffers, and data of the program (tables of virtual functions).
bool ModuleGuard::points_to_unseen_memory(const Members& members) const {
  constexpr uintptr_t kFirstPage = 1 << 16, kEndOfUserSpace = uintptr_t{1} << 47;
  const auto is_known = [&](uintptr_t word) {
    const auto* at = reinterpret_cast<const char*>(word);  // NOLINT(performance-no-int-to-ptr)
    if (at >= members.begin && at < members.begin + members.bytes.size()) return true;
    for (const auto& entry : entries_) {
      if (at == reinterpret_cast<const char*>(entry.module)) return true;
      for (const auto& item : children_of(*entry.module)) {
        const auto words = words_of(item.value());
        if (at == words.object || at == words.counts) return true;
      }
    }
    const auto is_tensor = [&](const auto& each) {
      return at == reinterpret_cast<const char*>(each.first.unsafeGetTensorImpl());
    };
    if (std::any_of(tensors_.begin(), tensors_.end(), is_tensor)) return true;
    Dl_info info{};
    return dladdr(at, &info) != 0;
  };
  const auto begin = reinterpret_cast<uintptr_t>(members.begin), end = begin + members.bytes.size();
  for (auto at = (begin + sizeof(uintptr_t) - 1) / sizeof(uintptr_t) * sizeof(uintptr_t); at + sizeof(uintptr_t) <= end;
       at += sizeof(uintptr_t)) {
    uintptr_t word = 0;
    std::memcpy(&word, members.bytes.data() + (at - begin), sizeof(word));
    if (word >= kFirstPage && word < kEndOfUserSpace && !is_known(word)) return true;
  }
  return false;
}

void ModuleGuard::add(const torch::nn::Module& module, CallArguments::ModuleObject object, const std::string& name) {
  const auto* hook_point = dynamic_cast<const HookPoint*>(&module);
  const auto &parameters = parameters_of(module), &buffers = buffers_of(module);
  const auto& children = children_of(module);
  entries_.push_back({&module, name, module.is_training(), hook_point, hash_of_hooks(hook_point), children.size(),
                      parameters.size() + buffers.size()});
  for (const auto& item : children) children_.push_back(item.value());
  for (const auto& item : parameters) tensors_.emplace_back(item.value(), TensorGuard(item.value()));
  for (const auto& item : buffers) tensors_.emplace_back(item.value(), TensorGuard(item.value()));
  const auto torch_members = find_torch_members(module);
  add_object(module, torch_members.size ? torch_members : object, name, !torch_members.size);
  // The vectors themselves are among the members that were added last. If these hold, the elements are where they were.
  const auto owner = members_.size() - 1;
  for (const auto& list : find_torch_lists(module)) {
    add_members(list.begin, list.size, name, false);
    members_[owner].lists++;
  }
  for (const auto& item : children)
    if (item.value()) add(*item.value(), object_of(item.value()), name.empty() ? item.key() : name + "." + item.key());
}

void ModuleGuard::add_members(const void* begin, size_t size, const std::string& name, bool of_own_class) {
  if (size == 0) return;
  const auto* bytes = static_cast<const char*>(begin);
  members_.push_back({bytes, std::string(bytes, size), name, of_own_class});
}

bool ModuleGuard::Members::hold() const {
  if (ignored.empty()) return std::memcmp(begin, bytes.data(), bytes.size()) == 0;
  for (size_t i = 0; i < bytes.size(); i++)
    if (!ignored[i] && begin[i] != bytes[i]) return false;
  return true;
}

void ModuleGuard::exclude_changed_members() {
  for (size_t m = 0; m < members_.size(); m++) {
    auto& each = members_[m];
    if (each.hold()) continue;
    if (const auto lists = static_cast<ptrdiff_t>(std::exchange(each.lists, 0))) {
      const auto next = members_.begin() + static_cast<ptrdiff_t>(m) + 1;
      members_.erase(next, next + lists);
      complete_ = false;
    }
    each.ignored.resize(each.bytes.size());
    for (size_t i = 0; i < each.bytes.size(); i++)
      if (each.begin[i] != each.bytes[i]) each.ignored[i] = true;
  }
}

bool ModuleGuard::add_to(GuardSnapshot& snapshot) const {
  auto tensor = tensors_.begin();
  for (const auto& entry : entries_) {
    snapshot.add(entry.module->*member_of(TrainingFlagOf()));
    snapshot.add_list(children_of(*entry.module).items());
    for (const auto* dict : {&parameters_of(*entry.module), &buffers_of(*entry.module)}) {
      snapshot.add_list(dict->items());
      for (const auto& item : *dict)
        if (!tensor++->second.add_to(snapshot, item.value())) return false;
    }
    if (!entry.hook_point) continue;
    snapshot.add(*entry.hook_point);
    if (const auto* hooks = entry.hook_point->hooks()) {
      const auto add = [&](const auto& list) {
        snapshot.add_list(list.entries());
        for (const auto& hook : list.entries()) snapshot.add(hook->id);
      };
      add(hooks->forward_pre), add(hooks->forward), add(hooks->around), add(hooks->backward_pre), add(hooks->backward);
    }
  }
  for (const auto& each : members_) {
    if (!each.ignored.empty()) return false;
    snapshot.add(each.begin, each.bytes.size());
  }
  return true;
}

bool ModuleGuard::holds(const torch::nn::Module& root, std::string* why) const {
  const auto fails = [&](const Entry& entry, const std::string& what) {
    if (why) *why = (entry.name.empty() ? "the module" : "module " + entry.name) + what;
    return false;
  };
  if (&root != entries_.front().module || !same_owner(root_, root.weak_from_this()) || typeid(root) != *root_type_)
    return fails(entries_.front(), " is another object");
  auto child = children_.begin();
  auto tensor = tensors_.begin();
  // Children and tensors are listed in pre-order, as the entries: those of an entry come before those of its
  // submodules.
  for (const auto& entry : entries_) {
    const auto& module = *entry.module;
    if (module.is_training() != entry.training)
      return fails(entry, entry.training ? " is in eval mode, it was in training mode"
                                         : " is in training mode, it was in eval mode");
    const auto& children = children_of(module);
    if (children.size() != entry.children) return fails(entry, " has other submodules");
    for (const auto& item : children)
      if (!same_owner(item.value(), *child++)) return fails(entry, "." + item.key() + " was replaced");
    const auto &parameters = parameters_of(module), &buffers = buffers_of(module);
    if (parameters.size() + buffers.size() != entry.tensors) return fails(entry, " has other parameters or buffers");
    for (const auto* dict : {&parameters, &buffers})
      for (const auto& item : *dict) {
        const auto& [traced, guard] = *tensor++;
        if (!item.value().is_same(traced)) return fails(entry, ": " + item.key() + " is another tensor");
        if (!guard.holds(item.value()))
          return fails(entry, ": " + item.key() + " is " + guard.difference(item.value()));
      }
    if (hash_of_hooks(entry.hook_point) != entry.hooks) return fails(entry, " has other hooks");
  }
  for (const auto& each : members_)
    if (!each.hold()) {
      if (why)
        *why =
            "a member or an option of " + (each.name.empty() ? "the module" : "module " + each.name) + " has changed";
      return false;
    }
  return true;
}

}  // namespace tessera::compiler
