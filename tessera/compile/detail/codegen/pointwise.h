#pragma once
#include "tessera/compile/detail/ir/program.h"

#include <optional>
#include <string>
#include <tuple>
#include <vector>

namespace tessera::compiler::codegen {

// into[i] = formula(operands[i]) for every element i, in the order in which they lie in memory.
//   %3 = aten.div.Tensor(%1, 2)   ->   {into %3, "$0 / $1", {%1, 2}}
struct Assignment {
  ValueId into = kNone;
  const char* formula = "";        // $0 is the first operand
  std::vector<Arg> operands = {};  // values and numbers
  ValueList pieces = {};           // not empty: `into` is these, one behind the other, and there is no formula
};

// What a node computes, if that is something we generate: one assignment, or one for each item of a _foreach op. Empty:
// it is not. The bits are those of LibTorch's kernel.
std::vector<Assignment> assignments_of(const Program& program, const Node& node);
std::vector<std::string> pointwise_ops();  // that have a formula

// Element i of one lies as far from its beginning as element i of the other.
bool in_step(const Type& a, const Type& b);

// Where a value lies. Values of one place that lie in step are the same memory.
struct Place {
  int32_t buffer;
  int64_t offset;
  c10::ScalarType dtype;
  auto operator<=>(const Place&) const = default;
};
inline Place place_of(const Program& program, ValueId id) {
  const auto& value = program[id];
  return {value.buffer, value.offset, value.type.dtype};
}

}  // namespace tessera::compiler::codegen
