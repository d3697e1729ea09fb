#pragma once
#include "tessera/compile/detail/ir/program.h"

#include <optional>
#include <string>
#include <tuple>
#include <vector>

namespace tessera::compiler::codegen {

// into[i] = formula(operands[i]) for every element i, in memory order.
//   %3 = aten.div.Tensor(%1, 2)   ->   {into %3, "$0 / $1", {%1, 2}}
struct Assignment {
  ValueId into = kNone;
  const char* formula = "";        // $0 is the first operand
  std::vector<Arg> operands = {};  // values and numbers
  ValueList cat_inputs = {};       // not empty: `into` is the concatenation of these, without a formula
};

// What a node computes, if a kernel can be generated for it: one assignment, or one per item of a _foreach op.
// Otherwise empty. The results are bitwise equal to those of LibTorch's kernel.
std::vector<Assignment> assignments_of(const Program& program, const Node& node);
// The same for operands of any type and layout, which the caller must check. other_formula: for a node that has no
// formula of at most one rounding; may be null.
std::vector<Assignment> pointwise_of(const Node& node, const char* other_formula);
std::vector<std::string> pointwise_ops();  // names of all ops that have a formula

// Do the two types store element i at the same distance from their first element, for all i?
bool same_element_layout(const Type& a, const Type& b);

// Where a value is stored. Values with equal locations and the same element layout are the same memory.
struct MemoryLocation {
  int32_t buffer;
  int64_t offset;
  c10::ScalarType dtype;
  auto operator<=>(const MemoryLocation&) const = default;
};
inline MemoryLocation location_of(const Program& program, ValueId id) {
  const auto& value = program[id];
  return {value.buffer, value.offset, value.type.dtype};
}

}  // namespace tessera::compiler::codegen
