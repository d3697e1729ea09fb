#pragma once
#include <ATen/core/ivalue.h>

#include <string>
#include <string_view>
#include <vector>

namespace tessera {

// Explains how an op on distributed tensors is run. For each mesh axis it lists the sharding strategies with their
// costs and marks the chosen one (*). Then it lists the redistributions of the inputs. It runs no op and no collective.
// If the op would throw, the text ends with the error. Arguments are those of the schema, in order; omitted ones at the
// end have their defaults. Throws UsageError for an unknown op, or arguments that do not match the schema.
//
//   explain("aten::mm", {x, w})
//
//   aten::mm(f32[64, 10][S(0)], f32[10, 4][S(0)]) on mesh(tp=4)
//     axis tp, 4 ranks
//            40.978 us  R, R -> R
//       *    20.082 us  S(0), R -> S(0)
//            40.849 us  R, S(1) -> S(1)
//            20.312 us  S(1), S(0) -> P(sum)
//     input 1: tp: all_gather S(0)->R 144 B
//     result: [64, 4][S(0)]
std::string explain(std::string_view op, std::vector<c10::IValue> args);

}  // namespace tessera
