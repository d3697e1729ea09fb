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

// A replacement for torch::nn::ModuleHolder. The modules that it creates can have hooks.
//
//   struct FeedForwardImpl : torch::nn::Cloneable<FeedForwardImpl> {
//     void reset() override { up = register_module("up", tessera::nn::Linear(8, 32)); ... }
//     torch::Tensor forward(torch::Tensor x);
//   };
//   TESSERA_MODULE(FeedForward);             // instead of TORCH_MODULE(FeedForward)
//
// The holder creates a Hooked<FeedForwardImpl>: a class derived from yours that stores hooks and has a forward with the
// same signature, which runs the hooks around yours. Calls through the holder, ->forward, AnyModule and Sequential all
// run the hooks.
namespace tessera {

template <class Impl>
class Hooked;  // below

namespace detail {

// The type in which an argument is stored while hooks run. Tensors and containers of tensors are copied, so a hook that
// replaces one does not change the caller's variable. Other objects that forward takes by non-const reference are
// stored by reference, so forward can write to them.
template <class Arg, class Value = std::remove_cvref_t<Arg>>
using Stored = std::conditional_t<std::is_lvalue_reference_v<Arg> &&
                                      (!std::is_copy_constructible_v<Value> ||
                                       (!std::is_const_v<std::remove_reference_t<Arg>> && std::is_class_v<Value> &&
                                        !IsVector<Value>::value && !IsTuple<Value>::value &&
                                        !IsOptional<Value>::value && !std::is_base_of_v<at::TensorBase, Value>)),
                                  std::remove_reference_t<Arg>&, Value>;

template <class... Args>
void check_visitable(const char* what) {
  const char* missing = nullptr;
  ((missing = missing || can_visit<Args> ? missing : typeid(std::remove_cvref_t<Args>).name()), ...);
  TESSERA_CHECK(!missing, UsageError, "module ", running_module(), " has hooks, and its forward ", what, " of type ",
                c10::demangle(missing ? missing : ""), ". Hooks cannot find the tensors in that type. Give it a ",
                "function `friend void tessera_visit(T& value, auto&& field) { field(value.a), field(value.b); }`");
}

// A forward that can run more than once. Stores the arguments and the first result. Args are the parameter types that
// forward declares, so a nullopt argument is an optional tensor. The template does not depend on the module's type:
// modules with equal signatures share this code.
template <class R, class... Args>
class RepeatableForward {
 public:
  using Invoke = R (*)(Module& module, Args&&... args);

  template <class... Given>
  explicit RepeatableForward(Module& module, Invoke invoke, Given&&... given)
      : module_(module), invoke_(invoke), args_(std::forward<Given>(given)...) {}

  // Moves the tensors out of the stored arguments. A checkpoint keeps this object, and saves the input tensors itself.
  Tensors take_inputs() {
    auto inputs = tensors_of(args_);
    if constexpr (!kRefersToCaller) assign_tensors(args_, Tensors(inputs.size()));
    return inputs;
  }

  Tensors operator()(const Tensors& inputs) {
    TESSERA_CHECK(!kRefersToCaller || !returned_, UsageError, "module ", class_name(module_),
                  " takes an argument by non-const reference. That object may not exist any more when backward runs ",
                  "forward again for a checkpoint; take the argument by value or by const reference");
    if constexpr ((std::is_copy_constructible_v<Stored<Args>> && ...)) {
      auto args = args_;
      return run(args, inputs);
    } else {
      TESSERA_CHECK(!std::exchange(ran_, true), UsageError, "module ", class_name(module_),
                    " takes an argument that cannot be copied, so a checkpoint cannot run its forward again");
      return run(args_, inputs);
    }
  }

  // Returns the first result with these tensors in it.
  R finish(const Tensors& outputs) {
    returned_ = true;
    if constexpr (!std::is_void_v<R>) {
      // If forward returns one tensor, an around hook may return a result without calling forward.
      if constexpr (std::is_same_v<R, at::Tensor>)
        if (!result_) result_.emplace();
      TESSERA_CHECK(result_, InternalError, "an around hook of ", class_name(module_), " did not run forward");
      assign_tensors(*result_, outputs);
      return std::move(*result_);
    }
  }

 private:
  using Slot = std::conditional_t<std::is_void_v<R>, char, std::optional<R>>;
  static constexpr bool kRefersToCaller = (std::is_reference_v<Stored<Args>> || ...);

  Tensors run(std::tuple<Stored<Args>...>& args, const Tensors& inputs) {
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
  std::tuple<Stored<Args>...> args_;
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

// The types of the first n parameters of forward, for n given arguments. If forward is overloaded or a template: the
// types of the given arguments.
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

// The forward of a Hooked<Impl>, with the signature of Impl::forward, so AnyModule and ->forward find it. It has no
// virtual functions and does not derive from Impl: each further class between Impl and Hooked<Impl> would cost a vtable
// and destructors per module class.
template <class HookedModule, class Forward>
class HookedForward {  // Impl::forward is overloaded or a template: accept any arguments
 public:
  template <class... Args>
  decltype(auto) forward(Args&&... args) {
    return static_cast<HookedModule&>(*this).call(std::forward<Args>(args)...);
  }
};
template <class HookedModule, class R, class C, class... Args>
class HookedForward<HookedModule, R (C::*)(Args...)> {
 public:
  R forward(Args... args) { return static_cast<HookedModule&>(*this).call(std::forward<Args>(args)...); }
};
template <class HookedModule, class R, class C, class... Args>
class HookedForward<HookedModule, R (C::*)(Args...) const> : public HookedForward<HookedModule, R (C::*)(Args...)> {};

// Hooked<Impl>::clone() without the parts that depend on Impl: `clone_plain` is Impl::clone, `wrap` is
// Hooked<Impl>::wrap_plain. If this is the outermost clone(), copies the hooks of the module and of its submodules.
// Throws UsageError if the module has hooks itself: a parent without a holder may be copying it, and would then lose
// the hooks.
std::shared_ptr<Module> clone_hooked(const Module& module, const ModuleHooks* hooks,
                                     std::shared_ptr<Module> (*clone_plain)(const Module& module,
                                                                            const std::optional<torch::Device>& device),
                                     std::shared_ptr<Module> (*wrap)(const Module& plain),
                                     const std::optional<torch::Device>& device);

// Throws UsageError if the module has a distributed parameter or buffer: torch::save would need its storage.
void check_saved_as_one_file(const Module& module);

}  // namespace detail

// Impl, with hooks. Holders create it; it derives from Impl, so dynamic_cast<Impl*> works.
template <class Impl>
class Hooked final : public Impl,
                     public HookPoint,
                     public detail::HookedForward<Hooked<Impl>, decltype(detail::forward_of<Impl>())> {
 public:
  using Impl::Impl;
  Hooked() = default;
  explicit Hooked(const Impl& other) : Impl(other) {}
  using detail::HookedForward<Hooked<Impl>, decltype(detail::forward_of<Impl>())>::forward;

  // Impl::forward with hooks. Arguments with defaults may be omitted.
  template <class... Args>
  decltype(auto) call(Args&&... args) {
    const ModuleScope running(static_cast<const Module*>(this), &detail::path_of);
    if (C10_LIKELY(hooks() == nullptr)) return Impl::forward(std::forward<Args>(args)...);
    return call_with_hooks(std::forward<Args>(args)...);
  }

  // A deep copy with hooks and placements. If the module itself has hooks this throws: call tessera::clone(module). The
  // reason: if a parent without a holder calls this clone(), the hooks of the copy would be lost.
  std::shared_ptr<Module> clone(const std::optional<torch::Device>& device = std::nullopt) const override {
    return detail::clone_hooked(*this, hooks(), &clone_plain, &wrap_plain, device);
  }

  // torch::save. Throws UsageError, which names the functions to call, if a parameter is distributed.
  [[gnu::cold]] void save(torch::serialize::OutputArchive& archive) const override {
    detail::check_saved_as_one_file(*this);
    Impl::save(archive);
  }

  // A Hooked<Impl> that shares parameters and children with `plain`. Null if `plain` is not an Impl.
  [[gnu::cold, gnu::noinline]] static std::shared_ptr<Module> wrap_plain(const Module& plain) {
    const auto* impl = dynamic_cast<const Impl*>(&plain);
    return impl ? std::make_shared<Hooked>(*impl) : nullptr;
  }

 private:
  [[gnu::cold]] static std::shared_ptr<Module> clone_plain(const Module& self,
                                                           const std::optional<torch::Device>& device) {
    return static_cast<const Hooked&>(self).Impl::clone(device);
  }
  template <class... Given>
  auto call_with_hooks(Given&&... given) {
    using Types = typename detail::Declared<Impl, decltype(detail::forward_of<Impl>()), std::tuple<Given&&...>>::Types;
    return call_as(static_cast<Types*>(nullptr), std::forward<Given>(given)...);
  }
  template <class... Args, class... Given>
  auto call_as(std::tuple<Args...>*, Given&&... given) {
    using R = decltype(std::declval<Impl&>().forward(std::declval<Args>()...));
    return detail::run_hooked<R, Args...>(*this, *hooks(), &invoke<R, Args...>, std::forward<Given>(given)...);
  }
  template <class R, class... Args>
  static R invoke(Module& self, Args&&... args) {
    return static_cast<Hooked&>(self).Impl::forward(static_cast<Args&&>(args)...);
  }
};

// The base class of holders; TESSERA_MODULE derives one from it. Like torch::nn::ModuleHolder, a holder is a shared
// pointer to a module.
template <class Impl>
class Holder : public torch::nn::ModuleHolder<Hooked<Impl>> {
 public:
  using torch::nn::ModuleHolder<Hooked<Impl>>::ModuleHolder;

  // Calls forward, with hooks.
  template <class... Args>
  decltype(auto) operator()(Args&&... args) {
    return this->impl_->call(std::forward<Args>(args)...);
  }
  template <class... Args>
  decltype(auto) operator()(Args&&... args) const {
    return this->impl_->call(std::forward<Args>(args)...);
  }

  // The functions of hooks.h as members, as in PyTorch.
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
  // The parameter with this name, such as "layers.0.weight".
  at::Tensor get_parameter(std::string_view name) { return tessera::get_parameter(**this, name); }
};

// A deep copy of a module with its hooks and placements. Given a holder, returns a holder.
std::shared_ptr<Module> clone(const Module& module, const std::optional<torch::Device>& device = std::nullopt);
template <class H>
requires std::is_base_of_v<torch::detail::ModuleHolderIndicator, H> H
clone(const H& holder, const std::optional<torch::Device>& device = std::nullopt) {
  return H(std::dynamic_pointer_cast<typename H::ContainedType>(clone(static_cast<const Module&>(*holder), device)));
}

}  // namespace tessera

// Defines Name as the holder of ImplType.
#define TESSERA_MODULE_IMPL(Name, ImplType)         \
  class Name : public ::tessera::Holder<ImplType> { \
   public:                                          \
    using ::tessera::Holder<ImplType>::Holder;      \
    using Impl [[maybe_unused]] = ImplType;         \
  }

// Defines Name as the holder of NameImpl. Use it instead of TORCH_MODULE(Name).
#define TESSERA_MODULE(Name) TESSERA_MODULE_IMPL(Name, Name##Impl)
