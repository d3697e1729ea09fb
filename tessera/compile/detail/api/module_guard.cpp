#include "tessera/compile/detail/api/module_guard.h"

#include "tessera/base/detail/hash.h"
#include "tessera/nn/hooks.h"

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
// An explicit instantiation may name private members.
template struct MemberAccess<ParametersOf, &torch::nn::Module::parameters_>;
template struct MemberAccess<BuffersOf, &torch::nn::Module::buffers_>;
template struct MemberAccess<ChildrenOf, &torch::nn::Module::children_>;

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

}  // namespace

ModuleGuard::ModuleGuard(const torch::nn::Module& root, CallArguments::ModuleObject object) {
  add(root, "");
  const void* options = nullptr;
  size_t size = 0;
  if (find_torch_options(root, options, size)) return;  // add() has them
  if (object.size == 0) {
    complete_ = false;
    return;
  }
  // The members before and after the torch::nn::Module part of the object.
  const auto* begin = static_cast<const char*>(object.begin);
  const auto* base = reinterpret_cast<const char*>(&root);
  const auto* base_end = base + sizeof(torch::nn::Module);
  complete_ = true;
  for (size_t i = 1; i < entries_.size(); i++)
    if (!find_torch_options(*entries_[i].module, options, size)) complete_ = false;
  add_members(begin, static_cast<size_t>(base - begin), "");
  add_members(base_end, static_cast<size_t>(begin + object.size - base_end), "");
}

void ModuleGuard::add(const torch::nn::Module& module, const std::string& name) {
  const auto* hook_point = dynamic_cast<const HookPoint*>(&module);
  const auto &parameters = parameters_of(module), &buffers = buffers_of(module);
  const auto& children = children_of(module);
  entries_.push_back({&module, name, module.is_training(), hook_point, hash_of_hooks(hook_point), children.size(),
                      parameters.size() + buffers.size()});
  for (const auto& item : children) children_.push_back(item.value().get());
  for (const auto& item : parameters) tensors_.emplace_back(item.value(), TensorGuard(item.value()));
  for (const auto& item : buffers) tensors_.emplace_back(item.value(), TensorGuard(item.value()));
  const void* options = nullptr;
  size_t size = 0;
  if (!find_torch_options(module, options, size))
    complete_ = false;
  else if (options)
    add_members(options, size, name);
  for (const auto& item : children)
    if (item.value()) add(*item.value(), name.empty() ? item.key() : name + "." + item.key());
}

void ModuleGuard::add_members(const void* begin, size_t size, const std::string& name) {
  if (size == 0) return;
  const auto* bytes = static_cast<const char*>(begin);
  members_.push_back({bytes, std::string(bytes, size), name});
}

bool ModuleGuard::Members::hold() const {
  if (ignored.empty()) return std::memcmp(begin, bytes.data(), bytes.size()) == 0;
  for (size_t i = 0; i < bytes.size(); i++)
    if (!ignored[i] && begin[i] != bytes[i]) return false;
  return true;
}

void ModuleGuard::exclude_changed_members() {
  for (auto& each : members_) {
    if (each.hold()) continue;
    each.ignored.resize(each.bytes.size());
    for (size_t i = 0; i < each.bytes.size(); i++)
      if (each.begin[i] != each.bytes[i]) each.ignored[i] = true;
  }
}

bool ModuleGuard::holds(const torch::nn::Module& root, std::string* why) const {
  const auto fails = [&](const Entry& entry, const std::string& what) {
    if (why) *why = (entry.name.empty() ? "the module" : "module " + entry.name) + what;
    return false;
  };
  if (&root != entries_.front().module) return fails(entries_.front(), " is another object");
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
      if (item.value().get() != *child++) return fails(entry, "." + item.key() + " was replaced");
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
