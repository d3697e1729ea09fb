#include "tessera/pipelining/detail/action.h"

#include <array>
#include <charconv>
#include <ostream>

#include "tessera/base/error.h"

namespace tessera::pipelining {
namespace {

struct TypeName {
  ActionType type;
  std::string_view name;
};
constexpr std::array kTypeNames = {
    TypeName{ActionType::Forward, "F"},
    TypeName{ActionType::BackwardInput, "I"},
    TypeName{ActionType::BackwardWeight, "W"},
    TypeName{ActionType::FullBackward, "B"},
    TypeName{ActionType::OverlapForwardBackward, "OVERLAP_F_B"},
    TypeName{ActionType::Unshard, "UNSHARD"},
    TypeName{ActionType::Reshard, "RESHARD"},
    TypeName{ActionType::ReduceGrad, "REDUCE_GRAD"},
    TypeName{ActionType::SendForward, "SEND_F"},
    TypeName{ActionType::RecvForward, "RECV_F"},
    TypeName{ActionType::SendBackward, "SEND_B"},
    TypeName{ActionType::RecvBackward, "RECV_B"},
};

[[noreturn]] void not_an_action(std::string_view text) {
  TESSERA_FAIL(
      UsageError, "'", text,
      "' is not an action of a pipeline schedule. Write the stage, the type and the microbatch: 2F0, 1SEND_F3, "
      "0UNSHARD or (0F2;3B1)OVERLAP_F_B");
}

bool has_microbatch(ActionType type) {
  return type != ActionType::Unshard && type != ActionType::Reshard && type != ActionType::ReduceGrad;
}

std::optional<ActionType> type_named(std::string_view name) {
  for (const TypeName& row : kTypeNames)
    if (row.name == name) return row.type;
  return std::nullopt;
}

// Takes a number from the front of `text`.
std::optional<int64_t> take_number(std::string_view& text) {
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || text.front() == '-') return std::nullopt;
  text.remove_prefix(end - text.data());
  return value;
}

Action parse_single(std::string_view given) {
  std::string_view text = given;
  const std::optional<int64_t> stage = text.empty() ? std::nullopt : take_number(text);
  const size_t digits = std::min(text.find_first_of("0123456789"), text.size());
  const std::optional<ActionType> type = type_named(text.substr(0, digits));
  text.remove_prefix(digits);
  const std::optional<int64_t> microbatch = text.empty() ? std::nullopt : take_number(text);
  if (!stage || !type || !text.empty() || *type == ActionType::OverlapForwardBackward ||
      microbatch.has_value() != has_microbatch(*type))
    not_an_action(given);
  return {*stage, *type, microbatch, {}};
}

}  // namespace

std::string_view to_string(ActionType type) {
  for (const TypeName& row : kTypeNames)
    if (row.type == type) return row.name;
  return "?";
}

std::string to_string(const Action& action) {
  if (action.parts.empty())
    return std::to_string(action.stage) + std::string(to_string(action.type)) +
           (action.microbatch ? std::to_string(*action.microbatch) : "");
  std::string text;
  for (const Action& part : action.parts) text += (text.empty() ? "(" : ";") + to_string(part);
  return text + ")" + std::string(to_string(action.type));
}

std::ostream& operator<<(std::ostream& out, const Action& action) { return out << to_string(action); }

Action parse_action(std::string_view text) {
  if (text.empty() || text.front() != '(') return parse_single(text);
  const size_t close = text.find(')');
  if (close == std::string_view::npos || text.substr(close + 1) != to_string(ActionType::OverlapForwardBackward))
    not_an_action(text);
  Action action{-1, ActionType::OverlapForwardBackward, std::nullopt, {}};
  std::string_view inner = text.substr(1, close - 1);
  for (;;) {
    const size_t end = std::min(inner.find(';'), inner.size());
    action.parts.push_back(parse_single(inner.substr(0, end)));
    if (!is_compute(action.parts.back().type)) not_an_action(text);
    if (end == inner.size()) return action;
    inner.remove_prefix(end + 1);
  }
}

bool is_compute(ActionType type) { return type <= ActionType::OverlapForwardBackward; }

std::vector<Action> parts_of(const Action& action) {
  return action.parts.empty() ? std::vector<Action>{action} : action.parts;
}

}  // namespace tessera::pipelining
