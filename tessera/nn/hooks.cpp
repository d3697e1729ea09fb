#include "tessera/nn/hooks.h"

#include "tessera/base/error.h"
#include "tessera/nn/detail/backward_hooks.h"
#include "tessera/nn/detail/exchange_hooks.h"
#include "tessera/nn/module_tree.h"

#include <atomic>
#include <utility>

namespace tessera {
namespace detail {

bool ModuleHooks::empty() const {
  return forward_pre.empty() && forward.empty() && around.empty() && backward_pre.empty() && backward.empty();
}

void ModuleHooks::remove(uint64_t id) {
  forward_pre.remove(id), forward.remove(id), around.remove(id), backward_pre.remove(id), backward.remove(id);
}

std::string ModuleHooks::not_cloneable() const {
  std::string reason;
  const auto search = [&](const auto& list) {
    for (const auto& entry : list.entries())
      if (reason.empty()) reason = entry->options.not_cloneable;
  };
  search(forward_pre), search(forward), search(around), search(backward_pre), search(backward);
  return reason;
}

struct HookAccess {
  template <class Hook>
  static HookHandle add(Module& module, HookList<Hook> ModuleHooks::*list, Hook hook, HookOptions options) {
    static std::atomic<uint64_t> last{0};
    auto& point = hook_point(module);
    if (!point.hooks_) point.hooks_ = std::make_shared<ModuleHooks>();
    HookHandle handle;
    handle.hooks_ = point.hooks_;
    handle.id_ = ++last;
    ((*point.hooks_).*list).add(handle.id_, std::move(hook), std::move(options));
    return handle;
  }
  static void set(HookPoint& point, const ModuleHooks& hooks) { point.hooks_ = std::make_shared<ModuleHooks>(hooks); }
  static ModuleHooks* get(HookPoint& point) { return point.hooks_.get(); }
  static std::shared_ptr<ModuleHooks> exchange(HookPoint& point, std::shared_ptr<ModuleHooks> hooks) {
    return std::exchange(point.hooks_, std::move(hooks));
  }
};

HookHandle add_hook(Module& module, ForwardPreHook hook, HookOptions options) {
  return HookAccess::add(module, &ModuleHooks::forward_pre, std::move(hook), std::move(options));
}
HookHandle add_hook(Module& module, ForwardHook hook, HookOptions options) {
  return HookAccess::add(module, &ModuleHooks::forward, std::move(hook), std::move(options));
}
HookHandle add_hook(Module& module, AroundHook hook, HookOptions options) {
  return HookAccess::add(module, &ModuleHooks::around, std::move(hook), std::move(options));
}
HookHandle add_backward_pre_hook(Module& module, BackwardPreHook hook, HookOptions options) {
  return HookAccess::add(module, &ModuleHooks::backward_pre, std::move(hook), std::move(options));
}
HookHandle add_backward_hook(Module& module, BackwardHook hook, HookOptions options) {
  return HookAccess::add(module, &ModuleHooks::backward, std::move(hook), std::move(options));
}
void set_hooks(HookPoint& point, const ModuleHooks& hooks) { HookAccess::set(point, hooks); }
std::shared_ptr<ModuleHooks> exchange_hooks(HookPoint& point, std::shared_ptr<ModuleHooks> hooks) {
  return HookAccess::exchange(point, std::move(hooks));
}

void remove_around_hooks(Module& module, const std::function<bool(const AroundHook&)>& matches) {
  auto* hooks = HookAccess::get(hook_point(module));
  if (!hooks) return;
  for (const auto& entry : HookList<AroundHook>::Entries(hooks->around.entries()))
    if (matches(entry->hook)) hooks->around.remove(entry->id);
}

namespace {

Tensors run_around(Module& module, const HookList<AroundHook>::Entries& hooks, size_t count, const Tensors& inputs,
                   const ForwardCall& forward) {
  if (count == 0) return forward(inputs);
  // Captures by value: the hook may store `inner` and call it later.
  const ForwardCall inner = [&module, alive = module.shared_from_this(), hooks, count, forward](const Tensors& in) {
    return run_around(module, hooks, count - 1, in, forward);
  };
  return hooks[count - 1]->hook(module, inputs, inner);
}

}  // namespace

Tensors call_hooked(Module& module, const ModuleHooks& hooks, Tensors inputs, const ForwardCall& forward) {
  Tensors outputs;
  const auto forward_hooks = hooks.forward.entries();
  size_t started = 0;  // how many of forward_hooks
  try {
    BackwardHooks backward(module, hooks);
    for (const auto& entry : HookList<ForwardPreHook>::Entries(hooks.forward_pre.entries()))
      replace_tensors(inputs, entry->hook(module, inputs), "a forward pre hook", "inputs");
    inputs = backward.on_inputs(std::move(inputs));
    outputs = run_around(module, hooks.around.entries(), hooks.around.entries().size(), inputs, forward);
    while (started < forward_hooks.size()) {
      const auto& entry = forward_hooks[started++];
      replace_tensors(outputs, entry->hook(module, inputs, outputs), "a forward hook", "outputs");
    }
    return backward.on_outputs(std::move(outputs));
  } catch (...) {
    for (; started < forward_hooks.size(); started++) {
      const auto& entry = forward_hooks[started];
      if (!entry->options.always_call) continue;
      try {
        entry->hook(module, inputs, outputs);
      } catch (const std::exception& error) {
        TORCH_WARN("a forward hook of module ", running_module(), " with always_call threw while another exception ",
                   "was active: ", error.what());
      }
    }
    throw;
  }
}

}  // namespace detail

bool has_hook_point(const Module& module) { return dynamic_cast<const HookPoint*>(&module) != nullptr; }

HookPoint& hook_point(Module& module) {
  auto* point = dynamic_cast<HookPoint*>(&module);
  TESSERA_CHECK(
      point, UsageError, class_name(module),
      " cannot have hooks, because no Tessera holder created it. Declare it as tessera::nn::", class_name(module),
      " (for a module of torch::nn) or with TESSERA_MODULE(", class_name(module), ") instead of TORCH_MODULE");
  return *point;
}

void HookHandle::remove() {
  if (const auto hooks = hooks_.lock()) hooks->remove(id_);
  hooks_.reset();
}

}  // namespace tessera
