#pragma once
#include "tessera/base/visit.h"
#include "tessera/compile/detail/trace/call_arguments.h"

#include <c10/util/complex.h>

#include <bit>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace tessera::compiler {

// Everything in the result of a function that is not a tensor. A program returns tensors only; numbers are those of the
// trace, unless they are numbers of the call.
struct ResultLeaves {
  std::vector<double> numbers;  // in the order of detail::assign_numbers
  std::string others;           // integers, strings, lengths, keys: as text

  // All of them, for comparisons.
  std::string text() const {
    auto all = others;
    for (const double number : numbers) all += c10::str(" ", number, " ", std::bit_cast<uint64_t>(number));
    return all;
  }
};

namespace detail {

template <class T>
void add_result_leaves(const T& value, ResultLeaves& leaves) {
  const auto add = [&](const auto& text) { leaves.others += c10::str(" ", text); };
  if constexpr (std::is_base_of_v<at::TensorBase, T>) {
  } else if constexpr (IsNumber<T>) {
    leaves.numbers.push_back(value);
  } else if constexpr (std::is_same_v<T, float>) {
    add(c10::str(value, "f", std::bit_cast<uint32_t>(value)));
  } else if constexpr (std::is_enum_v<T>) {
    add(static_cast<int64_t>(value));
  } else if constexpr (std::is_integral_v<T>) {
    add(+value);
  } else if constexpr (std::is_same_v<T, c10::Scalar>) {
    if (value.isFloatingPoint())
      leaves.numbers.push_back(value.toDouble());
    else if (value.isComplex())
      add(value.toComplexDouble());
    else
      add(c10::str(value.isBoolean() ? "bool " : "", value.toLong()));
  } else if constexpr (tessera::detail::HasTesseraVisit<T>) {
    // NOLINTNEXTLINE(cppcoreguidelines-pro-type-const-cast): only read
    tessera_visit(const_cast<T&>(value), [&](auto& field) { add_result_leaves(std::as_const(field), leaves); });
  } else if constexpr (tessera::detail::IsOptional<T>::value) {
    add(value.has_value());
    if (value) add_result_leaves(*value, leaves);
  } else if constexpr (tessera::detail::IsTuple<T>::value) {
    std::apply([&](const auto&... each) { (add_result_leaves(each, leaves), ...); }, value);
  } else if constexpr (std::is_pointer_v<T> && !IsText<T>) {
  } else if constexpr (IsText<T>) {
    add(std::string(value));
  } else if constexpr (tessera::detail::IsMap<T>::value) {
    for (const auto& [key, each] : value) {
      if constexpr (requires { c10::str(key); }) add(key);
      add_result_leaves(each, leaves);
    }
  } else if constexpr (std::is_same_v<T, std::vector<bool>>) {
    for (const bool each : value) add(each);
  } else if constexpr (tessera::detail::IsVector<T>::value) {
    add(value.size());
    for (const auto& each : value) add_result_leaves(each, leaves);
  }
}

}  // namespace detail

template <class Result>
ResultLeaves leaves_of(const Result& result) {
  ResultLeaves leaves;
  detail::add_result_leaves(result, leaves);
  return leaves;
}

// What a program cannot put into a result: how many tensors and numbers it has, and its other leaves.
inline std::string describe_result(size_t tensors, const ResultLeaves& leaves) {
  return c10::str(tensors, " tensors, ", leaves.numbers.size(), " numbers", leaves.others.empty() ? "" : ",",
                  leaves.others);
}
// The same of a Result that has just been made; "nothing" if it cannot be made without arguments.
template <class Result>
std::string describe_new_result() {
  if constexpr (std::is_void_v<Result>) {
    return describe_result(0, {});
  } else if constexpr (std::is_default_constructible_v<Result>) {
    Result result{};
    return describe_result(tensors_of(result).size(), leaves_of(result));
  } else {
    return "nothing";
  }
}

}  // namespace tessera::compiler
