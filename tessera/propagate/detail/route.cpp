#include "tessera/propagate/detail/route.h"

#include <algorithm>
#include <string>
#include <unordered_map>
#include <vector>

namespace tessera::propagate {
namespace {

bool is_written(const c10::Argument& argument) { return argument.alias_info() && argument.alias_info()->isWrite(); }

// All overloads by name. The dispatcher has no lookup by name alone.
const std::vector<c10::OperatorHandle>& overloads_of(const std::string& name) {
  static const auto* by_name = [] {
    auto* all = new std::unordered_map<std::string, std::vector<c10::OperatorHandle>>;
    auto& dispatcher = c10::Dispatcher::singleton();
    for (const auto& known : dispatcher.getAllOpNames())
      if (const auto op = dispatcher.findSchema(known)) (*all)[known.name].push_back(*op);
    return all;
  }();
  static const auto* none = new std::vector<c10::OperatorHandle>;
  const auto found = by_name->find(name);
  return found == by_name->end() ? *none : found->second;
}

// "aten::add_" -> "aten::add", "aten::__ilshift__" -> "aten::__lshift__"
std::string without_in_place_mark(const std::string& name) {
  const auto dunder = name.find("::__i");
  if (dunder != std::string::npos && name.ends_with("__")) return name.substr(0, dunder + 4) + name.substr(dunder + 5);
  return name.ends_with("_") && !name.ends_with("__") ? name.substr(0, name.size() - 1) : name;
}

bool writes_nothing(const c10::FunctionSchema& schema) {
  return std::none_of(schema.arguments().begin(), schema.arguments().end(), is_written);
}

bool is_tensor_option(const c10::Argument& argument) {
  constexpr std::string_view kOptions[] = {"dtype", "layout", "device", "pin_memory"};
  return argument.default_value() && std::count(std::begin(kOptions), std::end(kOptions), argument.name()) > 0;
}

bool has_tensor_argument(const c10::FunctionSchema& schema) {
  return std::any_of(schema.arguments().begin(), schema.arguments().end(),
                     [](const auto& argument) { return argument.type()->str().find("Tensor") != std::string::npos; });
}

// True if the functional form takes the arguments of `op` without its out= arguments, and returns its new results and
// the values of the arguments that it writes.
bool matches(const c10::FunctionSchema& functional, const c10::FunctionSchema& op) {
  std::vector<const c10::Argument*> inputs;
  size_t written = 0, fresh = 0;
  for (const auto& argument : op.arguments()) {
    if (!argument.is_out()) inputs.push_back(&argument);
    written += is_written(argument);
  }
  for (const auto& result : op.returns()) fresh += !is_written(result);
  if (functional.returns().size() != fresh + written) return false;
  size_t matched = 0;
  for (const auto& argument : functional.arguments()) {
    const auto same = std::find_if(inputs.begin(), inputs.end(), [&](const auto* input) {
      return input->name() == argument.name() && *input->type() == *argument.type();
    });
    matched += same != inputs.end();
    if (same == inputs.end() && !is_tensor_option(argument)) return false;  // eye.m has dtype, eye.m_out has not
  }
  if (matched != inputs.size()) return false;
  return true;
}

bool has_out(const c10::FunctionSchema& schema) {
  return std::any_of(schema.arguments().begin(), schema.arguments().end(), [](const auto& a) { return a.is_out(); });
}

// The composite code of a decomposed op calls its in-place form, which must not call it back.
bool is_decomposed(const c10::OperatorHandle& op) {
  const auto* rule = entry_of(op).rule();
  return rule && rule->family == "decomposed";
}

// These change the memory of a tensor, not its values: a copy of the functional result would be something else.
constexpr std::string_view kChangesMemory[] = {"aten::set_", "aten::resize_", "aten::resize_as_",
                                               "aten::_resize_output_", "aten::resize_as_sparse_"};

bool changes_memory(const c10::OperatorHandle& op) {
  return std::count(std::begin(kChangesMemory), std::end(kChangesMemory), op.operator_name().name) > 0;
}

}  // namespace

std::optional<c10::OperatorHandle> functional_form(const c10::OperatorHandle& op) {
  const auto& name = op.operator_name().name;
  if (changes_memory(op)) return std::nullopt;
  for (const auto& base : {without_in_place_mark(name), without_in_place_mark(name) + "_functional"})
    for (const auto& other : overloads_of(base))
      if (writes_nothing(other.schema()) && matches(other.schema(), op.schema()) &&
          (has_out(op.schema()) || !is_decomposed(other)))
        return other;
  return std::nullopt;
}

OpRoute route_of(const OpEntry& entry) {
  if (entry.rule()) return {Route::Rule, {}};
  if (!entry.writes.empty())
    if (auto functional = functional_form(entry.op)) {
      const bool draws_plain =
          entry.random && !has_tensor_argument(functional->schema());  // rand.out: ranks would differ
      if (!draws_plain) return {Route::Functional, std::move(functional)};
    }
  if (!entry.writes.empty() || entry.view) return {Route::None, {}};
  const bool is_aten = entry.name.starts_with("aten::");
  if (!is_aten && entry.op.hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd))
    return {Route::Decompose, {}};
  return {Route::Gathered, {}};
}

std::string_view to_string(Route route) {
  switch (route) {
    case Route::Rule:
      return "rule";
    case Route::Functional:
      return "functional form";
    case Route::Decompose:
      return "decomposes";
    case Route::Gathered:
      return "gathered";
    case Route::None:
      return "none";
  }
  return "";
}

}  // namespace tessera::propagate
