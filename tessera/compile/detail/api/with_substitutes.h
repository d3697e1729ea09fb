#pragma once
#include "tessera/optim/detail/substitute_optimizer.h"

#include <string>
#include <type_traits>

namespace tessera::compiler {

namespace detail {

template <class T>
inline constexpr bool needs_substitute =
    std::is_base_of_v<torch::optim::Optimizer, T> && !std::is_base_of_v<OptimizerAccess, T> && !std::is_const_v<T>;

template <class T>
T& substitute_for(optim::detail::SubstituteOptimizers& substitutes, T& value) {
  if constexpr (needs_substitute<T>)
    return substitutes.of(value);
  else
    return value;
}

}  // namespace detail

// Why an argument cannot be in a compiled step: "" if it can.
template <class T>
std::string reason_against(T& value) {
  if constexpr (detail::needs_substitute<T>)
    return optim::detail::SubstituteOptimizers::reason_against(value);
  else
    return "";
}

// Calls f(args...) with substitutes for optimizers of torch::optim. They get what the call has changed.
template <class F, class... Args>
auto with_substitutes(optim::detail::SubstituteOptimizers& substitutes, F f, Args&... args) {
  substitutes.start_call();
  if constexpr (std::is_void_v<decltype(f(args...))>) {
    f(detail::substitute_for(substitutes, args)...);
    substitutes.write_back();
  } else {
    auto result = f(detail::substitute_for(substitutes, args)...);
    substitutes.write_back();
    return result;
  }
}

}  // namespace tessera::compiler
