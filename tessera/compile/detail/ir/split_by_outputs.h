#pragma once
#include "tessera/compile/detail/ir/split_forward_backward.h"

#include <vector>

namespace tessera::compiler {

// Splits a backward program by its results: the first part computes those in `first` and all that they depend on, the
// second part computes the others. A pipeline schedule runs the parts as I (gradients of the input) and W (gradients of
// the weights).
//
//   dh = mm(dy, w2^T)   dw2 = mm(h^T, dy)   dx = mm(dh, w1^T)   dw1 = mm(x^T, dh)
//   first = {dx}:   | dh  dx |   then   | dw2  dw1 |      dh is saved by the first part
//
// `first`: by output, 1 if it belongs to the first part. The outputs of a part keep their order. Collectives and draws
// keep their order, so the first part may have some of the second; a collective is waited for where it is posted.
SplitProgram split_by_outputs(Program program, const std::vector<char>& first);

}  // namespace tessera::compiler
