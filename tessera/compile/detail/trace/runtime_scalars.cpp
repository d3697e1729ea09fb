#include "tessera/compile/detail/trace/runtime_scalars.h"

#include "tessera/dtensor/random.h"
#include "tessera/tracing/detail/runtime_scalar.h"

#include <cmath>

namespace tessera::compiler {
namespace {

int32_t add_number(Program& program, const std::string& name, std::function<c10::IValue()> read) {
  program.numbers.push_back({name, std::move(read)});
  return static_cast<int32_t>(program.numbers.size() - 1);
}

std::string unique_number_name(const Program& program, const std::string& wanted) {
  size_t n = 0;
  for (const auto& number : program.numbers) n += number.name.starts_with(wanted);
  return n == 0 ? wanted : wanted + std::to_string(n);
}

}  // namespace

std::optional<RuntimeScalar> RuntimeScalars::find(Program& program, const c10::OperatorHandle& op, size_t argument,
                                                  const c10::IValue& value) {
  if (value.isDouble()) {
    const double number = value.toDouble();
    auto marked = find_runtime_scalar(std::abs(number));
    if (!marked) return {};
    for (const auto& [marker, index] : rates_)
      if (marker == std::abs(number)) return RuntimeScalar{index, std::signbit(number)};
    const auto index = add_number(program, unique_number_name(program, marked->name),
                                  [read = std::move(marked->read)] { return c10::IValue(read()); });
    rates_.emplace_back(std::abs(number), index);
    return RuntimeScalar{index, std::signbit(number)};
  }
  if (!value.isInt() || !op.operator_name().name.starts_with("tessera::philox_")) return {};
  const auto& name = op.schema().arguments()[argument].name();
  if (name == "seed") {
    own_stream_ = value.toInt() == seed_;
    if (!own_stream_) return {};
    if (stream_ < 0) {
      stream_ = add_number(program, "seed", [] { return c10::IValue(static_cast<int64_t>(random::state().seed)); });
      add_number(program, "draws", [] { return c10::IValue(static_cast<int64_t>(random::state().offset)); });
    }
    return RuntimeScalar{stream_};
  }
  if (name != "offset" || !own_stream_ || value.toInt() < offset_) return {};
  return RuntimeScalar{stream_ + 1, false, value.toInt() - offset_};
}

}  // namespace tessera::compiler
