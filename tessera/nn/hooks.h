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

// Hooks on modules, with PyTorch's names, order and rules. A module can have them if it was made by a Holder
// (holder.h). Hooks see the tensors among the arguments and in the result, as flat lists (base/visit.h says how they
// are found), and replace them by returning new ones. One call of a module:
//
//   forward pre hooks      in order; each sees what the one before returned
//   forward                inside of around hooks, the one registered last outermost
//   forward hooks          in order
//   ... backward ...
//   backward pre hooks     see and may replace the gradients of the outputs
//   backward hooks         see both, and may replace the gradients of the inputs
namespace tessera {

using torch::nn::Module;

struct HookOptions {
  bool prepend = false;
  // Forward hooks only: also called, without outputs, when forward or another hook throws.
  bool always_call = false;
  // Not empty: clone() of the module throws with this reason, because a copy of the hook would be wrong.
  std::string not_cloneable = {};
};

// Nothing: unchanged. Else exactly as many tensors as were seen.
using Replacement = std::optional<Tensors>;
using ForwardPreHook = std::function<Replacement(Module& module, const Tensors& inputs)>;
using ForwardHook = std::function<Replacement(Module& module, const Tensors& inputs, const Tensors& outputs)>;
using BackwardPreHook = std::function<Replacement(Module& module, const Tensors& grad_outputs)>;
using BackwardHook =
    std::function<Replacement(Module& module, const Tensors& grad_inputs, const Tensors& grad_outputs)>;
// Runs forward, as often and whenever it likes (a checkpoint runs it again in backward), and returns outputs. Not at
// all: only where forward returns one tensor.
using ForwardCall = std::function<Tensors(const Tensors& inputs)>;
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
  // Shared entries: a running call goes through the list as it was when the call began.
  using Entries = std::vector<std::shared_ptr<const Entry>>;

  void add(uint64_t id, Hook hook, HookOptions options) {
    auto entry = std::make_shared<const Entry>(Entry{id, std::move(hook), std::move(options)});
    entries_.insert(options.prepend ? entries_.begin() : entries_.end(), std::move(entry));
  }
  void remove(uint64_t id) {
    std::erase_if(entries_, [&](const auto& entry) { return entry->id == id; });
  }
  const Entries& entries() const { return entries_; }
  bool empty() const { return entries_.empty(); }

 private:
  Entries entries_;
};

// All hooks of one module. A copy is what a clone of the module gets.
struct ModuleHooks {
  HookList<ForwardPreHook> forward_pre;
  HookList<ForwardHook> forward;
  HookList<AroundHook> around;
  HookList<BackwardPreHook> backward_pre;
  HookList<BackwardHook> backward;

  bool empty() const;
  void remove(uint64_t id);
  std::string not_cloneable() const;  // the first reason; "" if none has one
};

struct HookAccess;

// One call of a module that has hooks. `forward` is what AroundHook describes.
Tensors call_hooked(Module& module, const ModuleHooks& hooks, Tensors inputs, const ForwardCall& forward);

}  // namespace detail

// What a Holder adds to a module: the place where its hooks are.
class HookPoint {
 public:
  HookPoint() = default;
  HookPoint(const HookPoint&) {}  // a copied module starts without hooks; clone() copies them knowingly
  HookPoint& operator=(const HookPoint&) { return *this; }
  virtual ~HookPoint() = default;

  // Null while there are none: the test that each call makes.
  const detail::ModuleHooks* hooks() const { return hooks_.get(); }

 private:
  friend struct detail::HookAccess;
  std::shared_ptr<detail::ModuleHooks> hooks_;
};

// The hooks' place in `module`. Throws UsageError if it has none, because it was not made by a Holder.
HookPoint& hook_point(Module& module);
bool has_hook_point(const Module& module);

// Removes a hook. Going out of scope it does nothing, as in PyTorch; so does removing twice, or after the module died.
class HookHandle {
 public:
  HookHandle() = default;
  void remove();

 private:
  friend struct detail::HookAccess;
  std::weak_ptr<detail::ModuleHooks> hooks_;
  uint64_t id_ = 0;
};

namespace detail {

// Hooks are written to return what is handy: nothing, one tensor, or a list.
template <class R, class F, class... Seen>
R call_hook(F& f, Seen&... seen) {
  using Given = decltype(f(seen...));
  if constexpr (std::is_void_v<Given>) {
    f(seen...);
    return std::nullopt;
  } else if constexpr (std::is_convertible_v<Given, at::Tensor>) {
    return Tensors{f(seen...)};
  } else {
    return f(seen...);
  }
}
HookHandle add_hook(Module& module, ForwardPreHook hook, HookOptions options);
HookHandle add_hook(Module& module, ForwardHook hook, HookOptions options);
HookHandle add_hook(Module& module, AroundHook hook, HookOptions options);
// By name: their signatures are those of the forward ones.
HookHandle add_backward_pre_hook(Module& module, BackwardPreHook hook, HookOptions options);
HookHandle add_backward_hook(Module& module, BackwardHook hook, HookOptions options);

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

// hook(module, inputs). Example:  register_forward_pre_hook(*up, [](Module&, const Tensors& in) { return in[0] * 2; });
template <class F>
HookHandle register_forward_pre_hook(Module& module, F hook, HookOptions options = {}) {
  return detail::add_hook(module, ForwardPreHook(detail::one_list(std::move(hook))), std::move(options));
}
// hook(module, inputs, outputs)
template <class F>
HookHandle register_forward_hook(Module& module, F hook, HookOptions options = {}) {
  return detail::add_hook(module, ForwardHook(detail::two_lists(std::move(hook))), std::move(options));
}
// hook(module, grad_outputs)
template <class F>
HookHandle register_full_backward_pre_hook(Module& module, F hook, HookOptions options = {}) {
  return detail::add_backward_pre_hook(module, detail::one_list(std::move(hook)), std::move(options));
}
// hook(module, grad_inputs, grad_outputs). Where no input needs a gradient it runs with undefined grad_inputs, and may
// replace nothing.
template <class F>
HookHandle register_full_backward_hook(Module& module, F hook, HookOptions options = {}) {
  return detail::add_backward_hook(module, detail::two_lists(std::move(hook)), std::move(options));
}
inline HookHandle register_around_hook(Module& module, AroundHook hook, HookOptions options = {}) {
  return detail::add_hook(module, std::move(hook), std::move(options));
}

}  // namespace tessera
