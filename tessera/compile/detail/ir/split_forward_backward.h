#pragma once
#include "tessera/compile/detail/ir/program.h"

#include <vector>

namespace tessera::compiler {

// A program split into a forward and a backward part (AOTAutograd: the partitioned joint graph). Values that the
// backward needs are saved by the forward in buffers of their own.
//
//   | forward ... | backward ... |   ->   forward: outputs, then one value per buffer that the backward needs
//                                        backward: inputs, some of which alias these buffers
struct SplitProgram {
  Program first, second;       // forward, backward
  size_t first_outputs = 0;    // the first outputs of `first` are the program's; the others are saved values
  std::vector<int32_t> saved;  // buffers, numbered as in both parts
};
// Splits before `node`. `first_outputs`: the number of program outputs that belong to the forward. Buffer numbers stay.
SplitProgram split_forward_backward(const Program& program, size_t node, size_t first_outputs);

}  // namespace tessera::compiler
