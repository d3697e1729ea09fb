#pragma once
#include "tessera/base/visit.h"

#include <torch/nn/module.h>

#include <concepts>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

// Module hooks, with PyTorch's names, order and rules. A module can have hooks if a Holder created it (holder.h). A
// hook receives the tensors of the arguments and of the result as flat lists (base/visit.h explains how they are
// found). It returns new tensors to replace them. One call of a module runs:
//
//   forward pre hooks      in order; each receives what the previous one returned
//   forward                inside the around hooks; the one that was registered last is outermost
//   forward hooks          in order
//   ... backward ...
//   backward pre hooks     receive the gradients of the outputs and may replace them
//   backward hooks         receive both, and may replace the gradients of the inputs
namespace tessera {

using torch::nn::Module;  // the base class of all modules

// Options of the register functions.
struct HookOptions {
  bool prepend = false;  // run before the hooks that are registered already
  // Forward hooks only: the hook also runs, without outputs, when forward or another hook throws.
  bool always_call = false;
  // If not empty, clone() of the module throws with this reason, because a copy of the hook would be wrong.
  std::string not_cloneable = {};
};

// What a hook returns: nullopt leaves the tensors unchanged, otherwise exactly as many tensors as it received.
using Replacement = std::optional<Tensors>;
// The signatures of hooks, as in PyTorch.
using ForwardPreHook = std::function<Replacement(Module& module, const Tensors& inputs)>;
using ForwardHook = std::function<Replacement(Module& module, const Tensors& inputs, const Tensors& outputs)>;
using BackwardPreHook = std::function<Replacement(Module& module, const Tensors& grad_outputs)>;
using BackwardHook =
    std::function<Replacement(Module& module, const Tensors& grad_inputs, const Tensors& grad_outputs)>;
// The forward that an around hook wraps: takes inputs and returns outputs.
using ForwardCall = std::function<Tensors(const Tensors& inputs)>;
// Replaces the call of forward. It may call `forward` several times, or later: a checkpoint calls it again in backward.
// It may skip the call only if forward returns exactly one tensor.
using AroundHook = std::function<Tensors(Module& module, const Tensors& inputs, const ForwardCall& forward)>;

namespace detail {

template <class Hook>
class HookList {
 public:
  struct Entry {
    uint64_t id;
    Hook hook;
    HookOptions options;
  };
  // Entries are shared: a running call uses the list as it was when the call began.
  using Entries = std::vector<std::shared_ptr<const Entry>>;

  void add(uint64_t id, Hook hook, HookOptions options) {
    const auto place = options.prepend ? entries_.begin() : entries_.end();
    entries_.insert(place, std::make_shared<const Entry>(Entry{id, std::move(hook), std::move(options)}));
  }
  void remove(uint64_t id) {
    std::erase_if(entries_, [&](const auto& entry) { return entry->id == id; });
  }
  const Entries& entries() const { return entries_; }
  bool empty() const { return entries_.empty(); }

 private:
  Entries entries_;
};

// All hooks of one module. A clone of the module gets a copy.
struct ModuleHooks {
  HookList<ForwardPreHook> forward_pre;
  HookList<ForwardHook> forward;
  HookList<AroundHook> around;
  HookList<BackwardPreHook> backward_pre;
  HookList<BackwardHook> backward;

  bool empty() const;
  void remove(uint64_t id);
  std::string not_cloneable() const;  // the first reason among the hooks; "" without a reason
};

struct HookAccess;

// Runs one call of a module that has hooks.
Tensors call_hooked(Module& module, const ModuleHooks& hooks, Tensors inputs, const ForwardCall& forward);

}  // namespace detail

// The base class that a Holder adds to a module: it stores the hooks of the module.
class HookPoint {
 public:
  HookPoint() = default;
  HookPoint(const HookPoint&) {}  // a copy starts without hooks; clone() copies them explicitly
  HookPoint& operator=(const HookPoint&) { return *this; }  // NOLINT(bugprone-unhandled-self-assignment)

  // Null if no hook was registered yet. Each call of the module tests this.
  const detail::ModuleHooks* hooks() const { return hooks_.get(); }

 protected:
  ~HookPoint() = default;  // not virtual: nothing deletes a module through it, and each module class has a vtable less

 private:
  friend struct detail::HookAccess;
  std::shared_ptr<detail::ModuleHooks> hooks_;
};

// The HookPoint of `module`. Throws UsageError if no Holder created the module.
HookPoint& hook_point(Module& module);
// Whether the module can have hooks.
bool has_hook_point(const Module& module);

// Removes a hook (PyTorch: RemovableHandle). The destructor does not remove the hook.
class HookHandle {
 public:
  HookHandle() = default;
  void remove();  // does nothing if the hook was removed before, or if the module was destroyed

 private:
  friend struct detail::HookAccess;
  std::weak_ptr<detail::ModuleHooks> hooks_;
  uint64_t id_ = 0;
};

namespace detail {

// Converts what a user hook returns (void, one tensor, or a list) to R.
template <class R, class F, class... Args>
R call_hook(F& f, Args&... args) {
  using Returned = decltype(f(args...));
  if constexpr (std::is_void_v<Returned>) {
    f(args...);
    return std::nullopt;
  } else if constexpr (std::is_convertible_v<Returned, at::Tensor>) {
    return Tensors{f(args...)};
  } else {
    return f(args...);
  }
}
HookHandle add_hook(Module& module, ForwardPreHook hook, HookOptions options);
HookHandle add_hook(Module& module, ForwardHook hook, HookOptions options);
HookHandle add_hook(Module& module, AroundHook hook, HookOptions options);
// These have names of their own because their signatures equal those of the forward hooks.
HookHandle add_backward_pre_hook(Module& module, BackwardPreHook hook, HookOptions options);
HookHandle add_backward_hook(Module& module, BackwardHook hook, HookOptions options);
// Removes the around hooks that `matches` returns true for.
void remove_around_hooks(Module& module, const std::function<bool(const AroundHook&)>& matches);

template <class F>
auto one_list(F hook) {
  return [hook = std::move(hook)](Module& m, const Tensors& a) mutable { return call_hook<Replacement>(hook, m, a); };
}
template <class F>
auto two_lists(F hook) {
  return [hook = std::move(hook)](Module& m, const Tensors& a, const Tensors& b) mutable {
    return call_hook<Replacement>(hook, m, a, b);
  };
}

}  // namespace detail

// Registers hook(module, inputs), which runs before forward.
// Example:  register_forward_pre_hook(*up, [](Module&, const Tensors& in) { return in[0] * 2; });
template <class F>
HookHandle register_forward_pre_hook(Module& module, F hook, HookOptions options = {}) {
  return detail::add_hook(module, ForwardPreHook(detail::one_list(std::move(hook))), std::move(options));
}
// Registers hook(module, inputs, outputs), which runs after forward.
template <class F>
HookHandle register_forward_hook(Module& module, F hook, HookOptions options = {}) {
  return detail::add_hook(module, ForwardHook(detail::two_lists(std::move(hook))), std::move(options));
}
// Registers hook(module, grad_outputs), which runs before the backward of the module.
template <class F>
HookHandle register_full_backward_pre_hook(Module& module, F hook, HookOptions options = {}) {
  return detail::add_backward_pre_hook(module, detail::one_list(std::move(hook)), std::move(options));
}
// Registers hook(module, grad_inputs, grad_outputs), which runs after the backward of the module. If no input needs a
// gradient, the hook runs with undefined grad_inputs and cannot replace them.
template <class F>
HookHandle register_full_backward_hook(Module& module, F hook, HookOptions options = {}) {
  return detail::add_backward_hook(module, detail::two_lists(std::move(hook)), std::move(options));
}
// Registers a hook that replaces the call of forward; see AroundHook. PyTorch has no such hook.
// Example:  register_around_hook(*block, [](Module&, const Tensors& in, const ForwardCall& forward) {
//             ScopedTimer timer("block");
//             return forward(in);
//           });
inline HookHandle register_around_hook(Module& module, AroundHook hook, HookOptions options = {}) {
  return detail::add_hook(module, std::move(hook), std::move(options));
}

}  // namespace tessera
