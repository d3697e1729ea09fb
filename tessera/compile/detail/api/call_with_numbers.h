#pragma once
#include "tessera/compile/detail/trace/call_arguments.h"

#include <tuple>
#include <type_traits>
#include <vector>

namespace tessera::compiler {
namespace detail {

// Puts the next numbers into `value`, in the order in which CallArguments finds them.
template <class T>
void assign_numbers(T& value, const double*& next) {
  using V = std::remove_cv_t<T>;
  if constexpr (IsNumber<V>) {
    value = *next++;
  } else if constexpr (std::is_same_v<V, c10::Scalar>) {
    if (value.isFloatingPoint()) value = c10::Scalar(*next++);
  } else if constexpr (tessera::detail::HasTesseraVisit<V>) {
    tessera_visit(value, [&](auto& field) { assign_numbers(field, next); });
  } else if constexpr (tessera::detail::IsOptional<V>::value) {
    if (value) assign_numbers(*value, next);
  } else if constexpr (tessera::detail::IsTuple<V>::value) {
    std::apply([&](auto&... each) { (assign_numbers(each, next), ...); }, value);
  } else if constexpr (tessera::detail::IsMap<V>::value) {
    for (auto& [key, each] : value) assign_numbers(each, next);
  } else if constexpr (std::is_same_v<V, std::vector<bool>>) {
  } else if constexpr (tessera::detail::IsVector<V>::value) {
    for (auto& each : value) assign_numbers(each, next);
  }
}

template <class T>
using CopiedArgument = std::conditional_t<can_replace_numbers<std::remove_cvref_t<T>>, std::remove_cvref_t<T>, T&>;

}  // namespace detail

// Calls f(args...). `numbers`: if not null, f gets copies of the arguments with these numbers in them.
template <class F, class... Args>
decltype(auto) call_with_numbers(F& f, const std::vector<double>* numbers, Args&... args) {
  if (!numbers) return f(args...);
  std::tuple<detail::CopiedArgument<Args>...> copies(args...);
  const double* next = numbers->data();
  const auto assign = [&](auto& each) {
    if constexpr (detail::can_replace_numbers<std::remove_cvref_t<decltype(each)>>) detail::assign_numbers(each, next);
  };
  std::apply([&](auto&... each) { (assign(each), ...); }, copies);
  return std::apply([&](auto&... each) -> decltype(auto) { return f(each...); }, copies);
}

}  // namespace tessera::compiler
