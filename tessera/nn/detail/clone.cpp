#include "tessera/nn/detail/replicated_over.h"
#include "tessera/nn/holder.h"

namespace tessera {
namespace detail {

void set_hooks(HookPoint& point, const ModuleHooks& hooks);  // hooks.cpp

namespace {

thread_local constinit int clones_running = 0;

// Open while a clone() that copies the hooks runs on this thread. Modules inside then do not copy theirs.
class CloneScope {
 public:
  CloneScope() { clones_running++; }
  ~CloneScope() { clones_running--; }
  CloneScope(const CloneScope&) = delete;
};

// Calls f(name, module of a, module of b) for the modules with equal names below `a` and `b`.
template <class F>
void for_each_pair(const std::string& name, const Module& a, Module& b, F f) {
  f(name, a, b);
  const auto others = b.named_children();
  for (const auto& child : a.named_children())
    if (const auto* same = others.find(child.key()))
      for_each_pair(name.empty() ? child.key() : name + "." + child.key(), *child.value(), **same, f);
}

// Copies the hooks of `from` and its submodules. Throws UsageError if one of them cannot be copied.
void copy_hooks(const Module& from, Module& to) {
  const auto for_each_hooked = [&](auto act) {
    for_each_pair("", from, to, [&](const std::string& name, const Module& a, Module& b) {
      const auto* point = dynamic_cast<const HookPoint*>(&a);
      if (point && point->hooks() && !point->hooks()->empty()) act(name, *point->hooks(), b);
    });
  };
  for_each_hooked([&](const std::string& name, const ModuleHooks& hooks, Module& copy) {
    const auto reason = hooks.not_cloneable();
    TESSERA_CHECK(reason.empty(), UsageError, "clone() of ", class_name(from), ": module '", name,
                  "' cannot be copied: ", reason);
    TESSERA_CHECK(has_hook_point(copy), UsageError, "clone() of ", class_name(from), ": module '", name,
                  "' has hooks, but its copy cannot have any. Create it in reset() with a Tessera holder");
  });
  for_each_hooked(
      [&](const std::string&, const ModuleHooks& hooks, Module& copy) { set_hooks(hook_point(copy), hooks); });
  for_each_pair("", from, to, [](const std::string&, const Module& a, Module& b) {
    if (const auto mesh = replicated_over(a)) set_replicated_over(b, mesh);
  });
}

}  // namespace

std::shared_ptr<Module> clone_hooked(const Module& module, const ModuleHooks* hooks,
                                     std::shared_ptr<Module> (*clone_plain)(const Module& module,
                                                                            const std::optional<torch::Device>& device),
                                     std::shared_ptr<Module> (*wrap)(const Module& plain),
                                     const std::optional<torch::Device>& device) {
  const bool outermost = clones_running == 0;
  TESSERA_CHECK(!outermost || !hooks || hooks->empty(), UsageError, "clone() of ", class_name(module),
                ", which has hooks: if a parent without a Tessera holder copies it, the hooks would be lost. Call ",
                "tessera::clone(model) on the outermost module, which keeps them");
  const CloneScope scope;
  auto copy = wrap(*clone_plain(module, device));
  TESSERA_CHECK(copy, InternalError, "clone() of ", class_name(module), " returned another type");
  if (outermost) copy_hooks(module, *copy);
  return copy;
}

}  // namespace detail

std::shared_ptr<Module> clone(const Module& module, const std::optional<torch::Device>& device) {
  std::shared_ptr<Module> copy;
  {
    const detail::CloneScope scope;
    copy = module.clone(device);
  }
  detail::copy_hooks(module, *copy);
  return copy;
}

}  // namespace tessera
