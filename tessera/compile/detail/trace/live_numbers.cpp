#include "tessera/compile/detail/trace/live_numbers.h"

#include "tessera/tracing/detail/live_number.h"
#include "tessera/dtensor/random.h"

#include <cmath>

namespace tessera::compiler {
namespace {

int32_t number_named(Program& program, const std::string& name, std::function<c10::IValue()> read) {
  program.numbers.push_back({name, std::move(read)});
  return static_cast<int32_t>(program.numbers.size() - 1);
}

std::string fresh_name(const Program& program, const std::string& wanted) {
  size_t n = 0;
  for (const auto& number : program.numbers) n += number.name.starts_with(wanted);
  return n == 0 ? wanted : wanted + std::to_string(n);
}

}  // namespace

std::optional<Live> LiveNumbers::find(Program& program, const c10::OperatorHandle& op, size_t argument,
                                      const c10::IValue& value) {
  if (value.isDouble()) {
    const double number = value.toDouble();
    auto behind = live_number_behind(std::abs(number));
    if (!behind) return {};
    for (const auto& [stands_for, live] : rates_)
      if (stands_for == std::abs(number)) return Live{live, std::signbit(number)};
    const auto live = number_named(program, fresh_name(program, behind->name),
                                   [read = std::move(behind->read)] { return c10::IValue(read()); });
    rates_.emplace_back(std::abs(number), live);
    return Live{live, std::signbit(number)};
  }
  if (!value.isInt() || !op.operator_name().name.starts_with("tessera::philox_")) return {};
  const auto& name = op.schema().arguments()[argument].name();
  if (name == "seed") {
    own_stream_ = value.toInt() == seed;
    if (!own_stream_) return {};
    if (stream_ < 0) {
      stream_ = number_named(program, "seed", [] { return c10::IValue(static_cast<int64_t>(random::state().seed)); });
      number_named(program, "draws", [] { return c10::IValue(static_cast<int64_t>(random::state().offset)); });
    }
    return Live{stream_};
  }
  if (name != "offset" || !own_stream_ || value.toInt() < offset) return {};
  return Live{stream_ + 1, false, value.toInt() - offset};
}

}  // namespace tessera::compiler
