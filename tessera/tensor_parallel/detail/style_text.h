#pragma once
#include "tessera/tensor_parallel/detail/style.h"

#include <tuple>

// The names of styles and of their fields in the text form of plans. The printer and the parser use the same tables.
namespace tessera::detail {

template <class S, class T>
struct Field {
  const char* name;
  T S::*member;
};
template <class S, class T>
Field(const char*, T S::*) -> Field<S, T>;

template <class S>
struct StyleText;

template <>
struct StyleText<ColwiseParallel> {
  using S = ColwiseParallel;
  static constexpr const char* kName = "colwise";
  static constexpr auto kFields =
      std::tuple{Field{"input", &S::input_layouts}, Field{"output", &S::output_layouts},
                 Field{"local", &S::use_local_output}, Field{"block", &S::block}, Field{"sections", &S::sections}};
};

template <>
struct StyleText<RowwiseParallel> {
  using S = RowwiseParallel;
  static constexpr const char* kName = "rowwise";
  static constexpr auto kFields = std::tuple{Field{"input", &S::input_layouts}, Field{"output", &S::output_layouts},
                                             Field{"local", &S::use_local_output}, Field{"block", &S::block}};
};

template <>
struct StyleText<SequenceParallel> {
  using S = SequenceParallel;
  static constexpr const char* kName = "sequence";
  static constexpr auto kFields = std::tuple{Field{"dim", &S::sequence_dim}, Field{"local", &S::use_local_output}};
};

template <>
struct StyleText<PrepareModuleInput> {
  using S = PrepareModuleInput;
  static constexpr const char* kName = "prepare_input";
  static constexpr auto kFields = std::tuple{Field{"from", &S::input_layouts}, Field{"to", &S::desired_input_layouts},
                                             Field{"local", &S::use_local_output}};
};

template <>
struct StyleText<PrepareModuleOutput> {
  using S = PrepareModuleOutput;
  static constexpr const char* kName = "prepare_output";
  static constexpr auto kFields = std::tuple{Field{"from", &S::output_layouts}, Field{"to", &S::desired_output_layouts},
                                             Field{"local", &S::use_local_output}};
};

template <>
struct StyleText<PrepareModuleInputOutput> {
  using S = PrepareModuleInputOutput;
  static constexpr const char* kName = "prepare_input_output";
  static constexpr auto kFields =
      std::tuple{Field{"input_from", &S::input_layouts},         Field{"input_to", &S::desired_input_layouts},
                 Field{"input_local", &S::use_local_input},      Field{"output_from", &S::output_layouts},
                 Field{"output_to", &S::desired_output_layouts}, Field{"output_local", &S::use_local_output}};
};

// Calls f(field) for each field of a style.
template <class S, class F>
void for_each_field(F f) {
  std::apply([&](const auto&... field) { (f(field), ...); }, StyleText<S>::kFields);
}

}  // namespace tessera::detail
