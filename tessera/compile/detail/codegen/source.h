#pragma once
#include "tessera/compile/detail/codegen/pointwise.h"

#include <functional>
#include <string>
#include <vector>

namespace tessera::compiler::codegen {

// A generated function: its text, and the values whose memory it is called with.
struct KernelSource {
  std::string text;
  ValueList outs, ins;  // written; only read
};

// loops: assignments that lie in step, each list over the same elements; loops do not touch what another one writes.
// is_local: buffers that nobody else sees, which become variables.
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
