#pragma once
#include <ATen/core/ivalue.h>

#include <string>
#include <string_view>
#include <vector>

namespace tessera {

// Why an op does what it does with these arguments: for each mesh axis the rows of its rule with their costs, the row
// that was taken (*), and what has to be redistributed for it. Runs nothing, posts nothing; where the op would throw, the
// text ends with why. Arguments are those of the schema, in order; those left out at the end take their defaults.
// Throws UsageError for an op that is not there, or arguments that are not its own.
//
//   explain("aten::mm", {x, w})
//
//   aten::mm(f32[8, 10][S(0)], f32[10, 4][S(0)]) on mesh(tp=4)
//     axis tp, 4 ranks
//            40.046 us  R, R -> R
//       *    20.036 us  S(0), R -> S(0)
//            20.076 us  S(1), S(0) -> P(sum)
//     input 1: tp: all_gather S(0)->R 120 B
//     result: [8, 4][S(0)]
std::string explain(std::string_view op, std::vector<c10::IValue> args);

}  // namespace tessera
