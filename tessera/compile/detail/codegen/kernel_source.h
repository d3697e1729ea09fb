#pragma once
#include "tessera/compile/detail/codegen/pointwise.h"

#include <functional>
#include <string>
#include <vector>

namespace tessera::compiler::codegen {

// The C++ source of a generated kernel, and the values that are its operands.
struct KernelSource {
  std::string text;
  ValueList outs, ins;  // written ones; ones that are only read
};

const char* c_type(c10::ScalarType dtype);  // "float" or "double"
// Rounds to the dtype, as LibTorch rounds a number that is combined with a tensor.
std::string constant_literal(const c10::IValue& number, c10::ScalarType dtype);
// The formula with its operands. read: the text that stands for a value.
std::string formula_text(const Assignment& assignment, c10::ScalarType dtype,
                         const std::function<std::string(ValueId)>& read);

// loops: each is a list of assignments with the same element layout. A loop does not access memory that another writes.
// is_local: buffers that only this kernel uses. They become local variables.
//
//   {into %3, "$0 / $1", {%1, 2}}           for (...) {
//   {into %4, "-$0", {%3}}                    const float v0 = in0[i];
//   with %3 local                             const float v1 = v0 / 2.0f;
//                                             const float v2 = -v1;
//                                             out0[i] = v2;
//                                           }
KernelSource write_kernel(const Program& program, const std::string& name,
                          const std::vector<std::vector<Assignment>>& loops,
                          const std::function<bool(int32_t)>& is_local);

}  // namespace tessera::compiler::codegen
