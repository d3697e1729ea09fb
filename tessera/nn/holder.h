#pragma once
#include "tessera/base/error.h"
#include "tessera/nn/hooks.h"
#include "tessera/nn/module_tree.h"

#include <torch/nn/cloneable.h>
#include <torch/nn/pimpl.h>

#include <memory>
#include <tuple>
#include <type_traits>
#include <utility>

// A drop-in for torch::nn::ModuleHolder whose modules can have hooks.
//
//   struct FeedForwardImpl : torch::nn::Cloneable<FeedForwardImpl> { ... torch::Tensor forward(torch::Tensor x); };
//   TESSERA_MODULE(FeedForward);             // where TORCH_MODULE(FeedForward) stood
//
// The holder makes a Hooked<FeedForwardImpl>: your class, with a place for hooks beside it and a forward in front of
// yours. So a call through the holder, through ->forward and through AnyModule or Sequential all run them, and a
// module's type tells whether it can have hooks at all.
namespace tessera {

template <class Impl>
class Hooked;

namespace detail {

// How an argument is kept while hooks run. Tensors and what is made of them are copied, so that a hook's replacement
// does not change the caller's variable; a struct of the caller's that forward may write to stays the caller's.
template <class Arg, class Value = std::remove_cvref_t<Arg>>
using Kept = std::conditional_t<std::is_lvalue_reference_v<Arg> &&
                                    (!std::is_copy_constructible_v<Value> ||
                                     (!std::is_const_v<std::remove_reference_t<Arg>> && std::is_class_v<Value> &&
                                      !IsVector<Value>::value && !IsTuple<Value>::value && !IsOptional<Value>::value &&
                                      !std::is_base_of_v<at::TensorBase, Value>)),
                                std::remove_reference_t<Arg>&, Value>;

template <class... Args>
void check_visitable(const char* what) {
  const char* missing = nullptr;
  ((missing = missing || can_visit<Args> ? missing : typeid(std::remove_cvref_t<Args>).name()), ...);
  TESSERA_CHECK(!missing, UsageError, "module ", running_module(), " has hooks, and ", what, " of type ",
                c10::demangle(missing ? missing : ""), " whose tensors they cannot see. Give that type a function ",
                "`friend void tessera_visit(T& value, auto&& field) { field(value.a), field(value.b); }`");
}

// A forward that can be run more than once: keeps the arguments, and the first result. Args are the types that forward
// declares, so that a nullopt is an optional tensor with a place of its own. The module's own type does not show here:
// modules with the same signature share this code.
template <class R, class... Args>
class RepeatableForward {
 public:
  using Invoke = R (*)(Module& module, Args&&... args);

  template <class... Given>
  explicit RepeatableForward(Module& module, Invoke invoke, Given&&... given)
      : module_(module), invoke_(invoke), args_(std::forward<Given>(given)...) {}

  // The tensors among the arguments. They are not kept here: a checkpoint keeps this object, and knows better where its
  // inputs come from.
  Tensors take_inputs() {
    auto inputs = tensors_of(args_);
    if constexpr (!kRefersToCaller) assign_tensors(args_, Tensors(inputs.size()));
    return inputs;
  }

  Tensors operator()(const Tensors& inputs) {
    TESSERA_CHECK(!kRefersToCaller || !returned_, UsageError, "module ", class_name(module_),
                  " takes an argument by reference, which may be gone when backward runs its forward again for a ",
                  "checkpoint; take it by value, or by const reference");
    if constexpr ((std::is_copy_constructible_v<Kept<Args>> && ...)) {
      auto args = args_;
      return run(args, inputs);
    } else {
      TESSERA_CHECK(!std::exchange(ran_, true), UsageError, "module ", class_name(module_),
                    " takes an argument that cannot be copied, so its forward cannot be run again for a checkpoint");
      return run(args_, inputs);
    }
  }

  // Returns the first result with these tensors in it.
  R finish(const Tensors& outputs) {
    returned_ = true;
    if constexpr (!std::is_void_v<R>) {
      // An around hook may answer in forward's place where the answer is one tensor: nothing else is to be made up.
      if constexpr (std::is_same_v<R, at::Tensor>)
        if (!result_) result_.emplace();
      TESSERA_CHECK(result_, InternalError, "an around hook of ", class_name(module_), " did not run forward");
      assign_tensors(*result_, outputs);
      return std::move(*result_);
    }
  }

 private:
  using Slot = std::conditional_t<std::is_void_v<R>, char, std::optional<R>>;
  static constexpr bool kRefersToCaller = (std::is_reference_v<Kept<Args>> || ...);

  Tensors run(std::tuple<Kept<Args>...>& args, const Tensors& inputs) {
    assign_tensors(args, inputs);
    return [&]<size_t... i>(std::index_sequence<i...>) {
      if constexpr (std::is_void_v<R>) {
        invoke_(module_, static_cast<Args&&>(std::get<i>(args))...);
        return Tensors{};
      } else {
        auto result = invoke_(module_, static_cast<Args&&>(std::get<i>(args))...);
        auto outputs = tensors_of(result);
        if (!result_) result_.emplace(std::move(result));
        return outputs;
      }
    }
    (std::index_sequence_for<Args...>());
  }

  Module& module_;
  Invoke invoke_;
  std::tuple<Kept<Args>...> args_;
  [[no_unique_address]] Slot result_{};
  bool ran_ = false, returned_ = false;
};

template <class R, class... Args, class... Given>
C10_NOINLINE R run_hooked(Module& module, const ModuleHooks& hooks, R (*invoke)(Module&, Args&&...), Given&&... given) {
  static_assert(!std::is_reference_v<R>, "forward() returns a reference: hooks could not replace what it returns");
  check_visitable<Args...>("takes an argument");
  if constexpr (!std::is_void_v<R>) check_visitable<R>("returns a value");
  auto forward = std::make_shared<RepeatableForward<R, Args...>>(module, invoke, std::forward<Given>(given)...);
  auto outputs =
      call_hooked(module, hooks, forward->take_inputs(), [forward](const Tensors& in) { return (*forward)(in); });
  return forward->finish(outputs);
}

// The first n of the types that forward declares; those of the arguments given where it is overloaded or a template.
template <class Impl, class Forward, class Given>
struct Declared {
  using Types = Given;
};
template <class Impl, class R, class C, class... Params, class... Given>
struct Declared<Impl, R (C::*)(Params...), std::tuple<Given...>> {
  template <size_t... i>
  static auto first(std::index_sequence<i...>) -> std::tuple<std::tuple_element_t<i, std::tuple<Params...>>...>;
  using Types = decltype(first(std::index_sequence_for<Given...>()));
};
template <class Impl, class R, class C, class... Params, class Given>
struct Declared<Impl, R (C::*)(Params...) const, Given> : Declared<Impl, R (C::*)(Params...), Given> {};

template <class Impl>
auto forward_of() {
  if constexpr (requires { &Impl::forward; })
    return &Impl::forward;
  else
    return nullptr;
}

// What every Hooked<Impl> has, whatever its forward looks like.
template <class Impl>
class HookedBase : public Impl, public HookPoint {
 public:
  using Impl::Impl;
  HookedBase() = default;
  explicit HookedBase(const Impl& other) : Impl(other) {}

  // forward, with hooks; arguments of forward that have defaults may be left out.
  template <class... Args>
  decltype(auto) call(Args&&... args) {
    const ModuleScope running(static_cast<const Module*>(this), &path_of);
    if (C10_LIKELY(hooks() == nullptr)) return Impl::forward(std::forward<Args>(args)...);
    return call_with_hooks(std::forward<Args>(args)...);
  }

 private:
  template <class... Given>
  auto call_with_hooks(Given&&... given) {
    using Types = typename Declared<Impl, decltype(forward_of<Impl>()), std::tuple<Given&&...>>::Types;
    return call_as(static_cast<Types*>(nullptr), std::forward<Given>(given)...);
  }
  template <class... Args, class... Given>
  auto call_as(std::tuple<Args...>*, Given&&... given) {
    using R = decltype(std::declval<Impl&>().forward(std::declval<Args>()...));
    return run_hooked<R, Args...>(*this, *hooks(), &invoke<R, Args...>, std::forward<Given>(given)...);
  }
  template <class R, class... Args>
  static R invoke(Module& self, Args&&... args) {
    return static_cast<HookedBase&>(self).Impl::forward(static_cast<Args&&>(args)...);
  }
};

// forward again, with the signature of Impl's, so that AnyModule and ->forward find it.
template <class Impl, class Forward>
class WithForward : public HookedBase<Impl> {  // overloaded or a template: take anything
 public:
  using HookedBase<Impl>::HookedBase;
  template <class... Args>
  decltype(auto) forward(Args&&... args) {
    return this->call(std::forward<Args>(args)...);
  }
};
template <class Impl, class R, class C, class... Args>
class WithForward<Impl, R (C::*)(Args...)> : public HookedBase<Impl> {
 public:
  using HookedBase<Impl>::HookedBase;
  R forward(Args... args) { return this->call(std::forward<Args>(args)...); }
};
template <class Impl, class R, class C, class... Args>
class WithForward<Impl, R (C::*)(Args...) const> : public WithForward<Impl, R (C::*)(Args...)> {
 public:
  using WithForward<Impl, R (C::*)(Args...)>::WithForward;
};

// Keeps the hooks of everything below as well. Throws UsageError where that is not possible.
void copy_hooks(const Module& from, Module& to);
// clone() of a module that has hooks itself: its parent may be copying it, and would lose them without a word.
void check_clone(const Module& module, const ModuleHooks* hooks);

class CloneScope {  // a clone() that takes care of the hooks is under way on this thread
 public:
  CloneScope();
  ~CloneScope();
  CloneScope(const CloneScope&) = delete;
  static bool active();
};

}  // namespace detail

template <class Impl>
class Hooked final : public detail::WithForward<Impl, decltype(detail::forward_of<Impl>())> {
  using Base = detail::WithForward<Impl, decltype(detail::forward_of<Impl>())>;

 public:
  using Base::Base;

  // A deep copy that keeps hooks and placements. Where `this` has hooks itself, write tessera::clone(module): called
  // by the clone() of a parent without a holder, the copy's hooks would be lost.
  std::shared_ptr<Module> clone(const std::optional<torch::Device>& device = std::nullopt) const override {
    const bool outermost = !detail::CloneScope::active();
    if (outermost) detail::check_clone(*this, this->hooks());
    detail::CloneScope scope;
    const auto plain = std::dynamic_pointer_cast<Impl>(Impl::clone(device));
    TESSERA_CHECK(plain, InternalError, "clone of ", class_name(*this), " gave another type");
    auto copy = std::make_shared<Hooked>(static_cast<const Impl&>(*plain));
    if (outermost) detail::copy_hooks(*this, *copy);
    return copy;
  }
};

template <class Impl>
class Holder : public torch::nn::ModuleHolder<Hooked<Impl>> {
 public:
  using torch::nn::ModuleHolder<Hooked<Impl>>::ModuleHolder;

  template <class... Args>
  decltype(auto) operator()(Args&&... args) {
    return this->impl_->call(std::forward<Args>(args)...);
  }
  template <class... Args>
  decltype(auto) operator()(Args&&... args) const {
    return this->impl_->call(std::forward<Args>(args)...);
  }

  template <class F>
  HookHandle register_forward_pre_hook(F hook, HookOptions options = {}) {
    return tessera::register_forward_pre_hook(**this, std::move(hook), std::move(options));
  }
  template <class F>
  HookHandle register_forward_hook(F hook, HookOptions options = {}) {
    return tessera::register_forward_hook(**this, std::move(hook), std::move(options));
  }
  template <class F>
  HookHandle register_full_backward_pre_hook(F hook, HookOptions options = {}) {
    return tessera::register_full_backward_pre_hook(**this, std::move(hook), std::move(options));
  }
  template <class F>
  HookHandle register_full_backward_hook(F hook, HookOptions options = {}) {
    return tessera::register_full_backward_hook(**this, std::move(hook), std::move(options));
  }
  at::Tensor get_parameter(std::string_view name) { return tessera::get_parameter(**this, name); }
};

// A deep copy with hooks and placements, of any module; and of a holder, as a holder.
std::shared_ptr<Module> clone(const Module& module, const std::optional<torch::Device>& device = std::nullopt);
template <class H>
requires std::is_base_of_v<torch::detail::ModuleHolderIndicator, H> H
clone(const H& holder, const std::optional<torch::Device>& device = std::nullopt) {
  return H(std::dynamic_pointer_cast<typename H::ContainedType>(clone(static_cast<const Module&>(*holder), device)));
}

}  // namespace tessera

#define TESSERA_MODULE_IMPL(Name, ImplType)         \
  class Name : public ::tessera::Holder<ImplType> { \
   public:                                          \
    using ::tessera::Holder<ImplType>::Holder;      \
    using Impl [[maybe_unused]] = ImplType;         \
  }

// Defines Name as the holder of NameImpl. Put it where TORCH_MODULE(Name) would stand.
#define TESSERA_MODULE(Name) TESSERA_MODULE_IMPL(Name, Name##Impl)
