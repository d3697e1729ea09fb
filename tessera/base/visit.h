#pragma once
#include <ATen/core/Tensor.h>

#include <array>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <typeinfo>
#include <utility>
#include <vector>

// Finds the tensors in a value of any type (PyTorch: tree_flatten). Hooks, checkpoints and the compiler use it.
//
//   Tensor, optional, vector, array, map, pair, tuple of visitable types     visited
//   numbers, enums, strings, pointers, shapes, options                       have no tensors
//   your own struct                                                          needs a friend tessera_visit:
//
//   struct Batch {
//     at::Tensor tokens;
//     std::optional<at::Tensor> mask;
//     friend void tessera_visit(Batch& b, auto&& field) { field(b.tokens), field(b.mask); }
//   };
//
// Pointers are not followed: a cache that is passed by pointer belongs to the module.
namespace tessera {

// A list of tensors, as torch::autograd has it.
using Tensors = std::vector<at::Tensor>;

namespace detail {

struct AnyField {  // a `field` argument, to test whether tessera_visit exists
  template <class T>
  void operator()(T&) const {}
};
template <class T>
concept HasTesseraVisit = requires(T& value) {
  tessera_visit(value, AnyField{});
};

template <class T>
struct IsVector : std::false_type {};
template <class T, class A>
struct IsVector<std::vector<T, A>> : std::true_type {};
template <class T, size_t n>
struct IsVector<std::array<T, n>> : std::true_type {};
template <class T>
struct IsMap : std::false_type {};
template <class K, class V, class... Rest>
struct IsMap<std::map<K, V, Rest...>> : std::true_type {};
template <class T>
struct IsTuple : std::false_type {};
template <class... Ts>
struct IsTuple<std::tuple<Ts...>> : std::true_type {};
template <class A, class B>
struct IsTuple<std::pair<A, B>> : std::true_type {};
template <class T>
struct IsOptional : std::false_type {};
template <class T>
struct IsOptional<std::optional<T>> : std::true_type {};

// Types of LibTorch and of the standard library that are passed to forward() and contain no tensors.
template <class T>
inline constexpr bool holds_no_tensors =
    std::is_arithmetic_v<T> || std::is_enum_v<T> || std::is_pointer_v<T> || std::is_null_pointer_v<T> ||
    std::is_empty_v<T> || std::is_convertible_v<T, std::string_view> || std::is_same_v<T, c10::Scalar> ||
    std::is_same_v<T, c10::Device> || std::is_same_v<T, c10::TensorOptions> || std::is_same_v<T, at::Generator> ||
    std::is_convertible_v<T, at::IntArrayRef>;

template <class T>
struct Visitable;
template <class T>
struct AllVisitable : std::bool_constant<holds_no_tensors<T>> {};
template <class... Ts>
struct AllVisitable<std::tuple<Ts...>> : std::bool_constant<(Visitable<std::remove_cvref_t<Ts>>::value && ...)> {};
template <class A, class B>
struct AllVisitable<std::pair<A, B>> : std::bool_constant<(Visitable<A>::value && Visitable<B>::value)> {};
template <class T, class A>
struct AllVisitable<std::vector<T, A>> : Visitable<T> {};
template <class T, size_t n>
struct AllVisitable<std::array<T, n>> : Visitable<T> {};
template <class K, class V, class... Rest>
struct AllVisitable<std::map<K, V, Rest...>> : Visitable<V> {};
template <class T>
struct AllVisitable<std::optional<T>> : Visitable<T> {};
template <class T>
struct Visitable
    : std::bool_constant<std::is_base_of_v<at::TensorBase, T> || HasTesseraVisit<T> || AllVisitable<T>::value> {};

}  // namespace detail

// True if visit_tensors() finds all tensors in a T. False for a struct without tessera_visit.
template <class T>
inline constexpr bool can_visit = detail::Visitable<std::remove_cvref_t<T>>::value;

// Calls f(at::Tensor&) for each tensor in `value`, in a fixed order. For an empty optional, f gets an undefined tensor,
// so positions do not depend on values; if f assigns it, the optional gets that tensor. Skips types that can_visit
// rejects.
template <class T, class F>
void visit_tensors(T& value, F&& f) {
  using V = std::remove_cv_t<T>;
  if constexpr (std::is_base_of_v<at::Tensor, V>) {
    f(static_cast<at::Tensor&>(value));
  } else if constexpr (std::is_same_v<V, std::optional<at::Tensor>>) {
    at::Tensor slot = value ? *value : at::Tensor();
    f(slot);
    if (slot.defined())
      value = std::move(slot);
    else if (value && value->defined())
      value.reset();
  } else if constexpr (detail::HasTesseraVisit<V>) {
    tessera_visit(value, [&](auto& field) { visit_tensors(field, f); });
  } else if constexpr (detail::IsOptional<V>::value) {
    if (value) visit_tensors(*value, f);
  } else if constexpr (detail::holds_no_tensors<V>) {
  } else if constexpr (detail::IsVector<V>::value) {
    for (auto& each : value) visit_tensors(each, f);
  } else if constexpr (detail::IsMap<V>::value) {
    for (auto& [key, each] : value) visit_tensors(each, f);
  } else if constexpr (detail::IsTuple<V>::value) {
    std::apply([&](auto&... each) { (visit_tensors(each, f), ...); }, value);
  }
}

// The tensors in `value`, in the order of visit_tensors().
template <class T>
Tensors tensors_of(const T& value) {
  Tensors found;
  // NOLINTNEXTLINE(cppcoreguidelines-pro-type-const-cast): only read below
  visit_tensors(const_cast<T&>(value), [&](const at::Tensor& t) { found.push_back(t); });
  return found;
}

// Replaces the tensors that tensors_of() finds. Requires: the same number of tensors.
template <class T>
void assign_tensors(T& value, const Tensors& tensors) {
  size_t at = 0;
  visit_tensors(value, [&](at::Tensor& t) { t = tensors[at++]; });
}

}  // namespace tessera
