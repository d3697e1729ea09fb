#pragma once
#include "tessera/base/detail/hash.h"
#include "tessera/base/visit.h"
#include "tessera/compile/detail/trace/tracer.h"
#include "tessera/state/optimizer_state.h"

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <string>
#include <type_traits>
#include <typeinfo>
#include <vector>

namespace torch::optim {
class Optimizer;
}

namespace tessera::compiler {

namespace detail {

template <class T>
inline constexpr bool always_false = false;

template <class T>
concept IsNumber = std::is_same_v<T, double>;
template <class T>
concept IsText = std::is_convertible_v<const T&, std::string>;

// Can a copy of a T with other numbers take its place in a call? The numbers in other arguments are keys.
template <class T>
inline constexpr bool can_replace_numbers =
    std::is_copy_constructible_v<T> && !std::is_const_v<T> && !std::is_base_of_v<torch::nn::Module, T> &&
    !std::is_base_of_v<OptimizerAccess, T> && !std::is_base_of_v<at::TensorBase, T> && can_visit<T>;

// Counts the fields that tessera_visit lists.
struct CountFields {
  size_t& count;
  template <class T>
  void operator()(T&) const {
    count++;
  }
};

// Converts to any type, to count the members of an aggregate: {AnyMember, AnyMember} initialises it if it has two.
struct AnyMember {
  template <class T>
  operator T() const;  // NOLINT(google-explicit-constructor)
};
template <class T, class... Members>
constexpr size_t members_of() {
  if constexpr (!std::is_aggregate_v<T> || sizeof...(Members) > 24)
    return 0;  // unknown
  else if constexpr (requires { T{Members{}..., AnyMember{}}; })
    return members_of<T, Members..., AnyMember>();
  else
    return sizeof...(Members);
}

}  // namespace detail

// Everything in the arguments of a call that is not a tensor, a module or an optimizer, one leaf per value and one per
// length, in the order of visiting.
struct ArgumentLeaf {
  enum class Kind : uint32_t { Number, Integer, Text, Length, Present, Options, Complex, Generator, Tensors, Class };
  Kind kind = Kind::Integer;
  uint32_t argument = 0;  // position in the call, from 0
  int64_t bits = 0;       // the value; of a Number its index in CallArguments::numbers, of a Text its hash
  bool operator==(const ArgumentLeaf&) const = default;
};
const char* text_of(ArgumentLeaf::Kind kind);  // for messages: "the number"

// The arguments of one call of a compiled function, sorted by kind.
//   modules, optimizers, tensors   are lifted: the program reads them anew on every call
//   numbers (double)               inputs of the program; a number that shapes or control flow depend on is a key
//   everything else                is a key: another value recompiles
class CallArguments {
 public:
  // Adds the next argument of the call.
  template <class T>
  void add(T& value) {
    numbers_are_keys_ = !detail::can_replace_numbers<std::remove_cv_t<T>>;
    leaf(Kind::Class, static_cast<int64_t>(typeid(T).hash_code()));
    visit(value);
    argument_++;
  }

  // Adds what the function itself holds: its numbers are keys.
  template <class T>
  void add_captures(T& function) {
    numbers_are_keys_ = true;
    visit(function);
  }

  // The bytes of a module object, which hold its members.
  struct ModuleObject {
    const void* begin = nullptr;
    size_t size = 0;  // 0: unknown
  };

  const char* program_name = "step";           // in reports
  std::string (*describe_result)() = nullptr;  // see describe_new_result(); of a step
  std::vector<torch::nn::Module*> modules;
  std::vector<ModuleObject> module_objects;  // of `modules`
  std::vector<OptimizerAccess*> optimizers;
  Tensors leaves;  // parameters that do not belong to any of `modules`
  Tensors tensors;
  std::vector<double> numbers;
  std::vector<ArgumentLeaf> others;
  std::vector<std::string> strings;

 private:
  using Kind = ArgumentLeaf::Kind;
  void leaf(Kind kind, int64_t bits) { others.push_back({kind, argument_, bits}); }
  void number(double value) {
    if (numbers_are_keys_) return leaf(Kind::Complex, static_cast<int64_t>(hash_bytes(&value, sizeof(value))));
    leaf(Kind::Number, static_cast<int64_t>(numbers.size()));
    numbers.push_back(value);
  }
  void text(std::string value) {
    leaf(Kind::Text, static_cast<int64_t>(hash_bytes(value.data(), value.size())));
    strings.push_back(std::move(value));
  }
  void scalar(const c10::Scalar& value);
  void options(const c10::TensorOptions& value);
  void generator(const at::Generator& value);
  void module(torch::nn::Module& value, ModuleObject object) {
    modules.push_back(&value);
    module_objects.push_back(object);
  }

  template <class T>
  void visit(T& value) {
    using V = std::remove_cv_t<T>;
    if constexpr (std::is_base_of_v<torch::nn::Module, V>) {
      // NOLINTNEXTLINE(cppcoreguidelines-pro-type-const-cast): programs write parameters of const modules too
      module(const_cast<V&>(value), {&value, std::is_same_v<V, torch::nn::Module> ? 0 : sizeof(V)});
    } else if constexpr (std::is_base_of_v<OptimizerAccess, V>) {
      optimizers.push_back(const_cast<V*>(&value));  // NOLINT(cppcoreguidelines-pro-type-const-cast)
    } else if constexpr (std::is_base_of_v<torch::optim::Optimizer, V>) {
      optimizers.push_back(own_optimizer(const_cast<V&>(value)));  // NOLINT(cppcoreguidelines-pro-type-const-cast)
    } else if constexpr (requires { static_cast<torch::nn::Module&>(*value); }) {
      using Pointed = std::remove_cvref_t<decltype(*value)>;
      const bool exact = std::is_same_v<Pointed, torch::nn::Module> ? false : typeid(*value) == typeid(Pointed);
      module(static_cast<torch::nn::Module&>(*value), {&*value, exact ? sizeof(Pointed) : 0});
    } else if constexpr (std::is_base_of_v<at::TensorBase, V>) {
      tensors.push_back(value);
    } else if constexpr (std::is_same_v<V, std::optional<at::Tensor>>) {
      leaf(Kind::Present, value.has_value());
      tensors.push_back(value ? *value : at::Tensor());
    } else if constexpr (detail::IsNumber<V>) {
      number(value);
    } else if constexpr (std::is_floating_point_v<V>) {
      const auto wide = static_cast<double>(value);  // of a long double, and the rest of it
      const double parts[] = {wide, static_cast<double>(value - static_cast<V>(wide))};
      leaf(Kind::Complex, static_cast<int64_t>(hash_bytes(parts, sizeof(parts))));
    } else if constexpr (std::is_integral_v<V> || std::is_enum_v<V>) {
      leaf(Kind::Integer, static_cast<int64_t>(value));
    } else if constexpr (detail::IsText<V>) {
      text(std::string(value));
    } else if constexpr (std::is_same_v<V, c10::Scalar>) {
      scalar(value);
    } else if constexpr (std::is_same_v<V, c10::TensorOptions> || std::is_same_v<V, c10::Device>) {
      options(c10::TensorOptions(value));
    } else if constexpr (std::is_same_v<V, at::Generator>) {
      generator(value);
    } else if constexpr (std::is_null_pointer_v<V> || std::is_empty_v<V>) {
    } else if constexpr (tessera::detail::HasTesseraVisit<V>) {
      visit_fields(const_cast<V&>(value));  // NOLINT(cppcoreguidelines-pro-type-const-cast): only read
    } else if constexpr (tessera::detail::IsOptional<V>::value) {
      leaf(Kind::Present, value.has_value());
      if (value) visit(*value);
    } else if constexpr (tessera::detail::IsTuple<V>::value) {
      std::apply([&](auto&... each) { (visit(each), ...); }, value);
    } else if constexpr (tessera::detail::IsMap<V>::value) {
      leaf(Kind::Length, static_cast<int64_t>(value.size()));
      for (auto& [key, each] : value) visit_key(key), visit(each);
    } else if constexpr (std::is_same_v<V, std::vector<bool>>) {
      leaf(Kind::Length, static_cast<int64_t>(value.size()));
      for (const bool each : value) leaf(Kind::Integer, each);
    } else if constexpr (tessera::detail::IsVector<V>::value) {
      leaf(Kind::Length, static_cast<int64_t>(value.size()));
      for (auto& each : value) visit(each);
    } else if constexpr (std::is_convertible_v<const V&, at::IntArrayRef>) {
      const at::IntArrayRef list = value;
      leaf(Kind::Length, static_cast<int64_t>(list.size()));
      for (const auto each : list) leaf(Kind::Integer, each);
    } else if constexpr (std::is_pointer_v<V>) {
      static_assert(detail::always_false<V>,
                    "compile: an argument is a pointer. What it points to can change between calls without being seen; "
                    "pass the object itself");
    } else {
      static_assert(detail::always_false<V>,
                    "compile: this argument type needs tessera_visit, which lists all its members (base/visit.h). Only "
                    "tensors, numbers, strings, enums, and containers of them can be inputs or keys of a program");
    }
  }
  template <class T>
  void visit_key(const T& key) {
    const bool before = std::exchange(numbers_are_keys_, true);
    visit(key);
    numbers_are_keys_ = before;
  }
  template <class T>
  void visit_fields(T& value) {
    if constexpr (std::is_polymorphic_v<T>)
      if (typeid(value) != typeid(T)) refuse_derived_class(typeid(value), typeid(T));
    const auto tensors_before = tensors.size();
    size_t listed = 0;
    tessera_visit(value, detail::CountFields{listed});
    constexpr size_t kMembers = detail::members_of<T>();
    if (listed > 0 && listed < kMembers) refuse_missing_members(typeid(T), listed, kMembers);
    tessera_visit(value, [&](auto& field) { visit(field); });
    // The number of tensors in a struct, for one that visits a container element by element.
    leaf(Kind::Tensors, static_cast<int64_t>(tensors.size() - tensors_before));
  }

  static OptimizerAccess* own_optimizer(torch::optim::Optimizer& optimizer);
  [[noreturn]] static void refuse_derived_class(const std::type_info& type, const std::type_info& base);
  [[noreturn]] static void refuse_missing_members(const std::type_info& type, size_t listed, size_t members);

  uint32_t argument_ = 0;
  bool numbers_are_keys_ = false;
};

// All tensors that the arguments hold, each once, with role and name, in this order:
//   1. parameters and buffers of modules ("net1.weight")
//   2. leaves, then parameters that only optimizers have
//   3. optimizer state ("net1.weight.exp_avg")
//   4. gradients that are defined
//   5. tensor arguments, by number
std::vector<Lifted> lift(const CallArguments& arguments);

}  // namespace tessera::compiler
