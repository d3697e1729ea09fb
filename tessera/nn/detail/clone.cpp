#include "tessera/nn/holder.h"

namespace tessera {
namespace detail {

void set_hooks(HookPoint& point, const ModuleHooks& hooks);  // hooks.cpp

namespace {
thread_local constinit int clones_under_way = 0;

// f(name, module in a, module in b) for the modules at the same places.
template <class F>
void walk_both(const std::string& name, const Module& a, Module& b, F f) {
  f(name, a, b);
  const auto theirs = b.named_children();
  for (const auto& child : a.named_children())
    if (const auto* same = theirs.find(child.key()))
      walk_both(name.empty() ? child.key() : name + "." + child.key(), *child.value(), **same, f);
}

}  // namespace

CloneScope::CloneScope() { clones_under_way++; }
CloneScope::~CloneScope() { clones_under_way--; }
bool CloneScope::active() { return clones_under_way > 0; }

void check_clone(const Module& module, const ModuleHooks* hooks) {
  TESSERA_CHECK(!hooks || hooks->empty(), UsageError, "clone() of ", class_name(module),
                ", which has hooks: if it is a parent without a holder that copies it, they would be lost. Write ",
                "tessera::clone(model) for the outermost module, which keeps them");
}

void copy_hooks(const Module& from, Module& to) {
  const auto each = [&](auto act) {
    walk_both("", from, to, [&](const std::string& name, const Module& a, Module& b) {
      const auto* point = dynamic_cast<const HookPoint*>(&a);
      if (point && point->hooks() && !point->hooks()->empty()) act(name, *point->hooks(), b);
    });
  };
  each([&](const std::string& name, const ModuleHooks& hooks, Module& copy) {
    const auto reason = hooks.not_cloneable();
    TESSERA_CHECK(reason.empty(), UsageError, "clone() of ", class_name(from), ": module '", name,
                  "' cannot be copied: ", reason);
    TESSERA_CHECK(has_hook_point(copy), UsageError, "clone() of ", class_name(from), ": module '", name,
                  "' has hooks, and its copy cannot have any; does reset() make it with a holder of ours?");
  });
  each([&](const std::string&, const ModuleHooks& hooks, Module& copy) { set_hooks(hook_point(copy), hooks); });
}

}  // namespace detail

std::shared_ptr<Module> clone(const Module& module, const std::optional<torch::Device>& device) {
  std::shared_ptr<Module> copy;
  {
    detail::CloneScope scope;
    copy = module.clone(device);
  }
  detail::copy_hooks(module, *copy);
  return copy;
}

}  // namespace tessera
