#pragma once
#include "tessera/compile/detail/ir/program.h"

#include <vector>

namespace tessera::compiler {

// A program cut in two at a node, the second run later: what the first leaves for the second goes over in memory of
// its own.
//
//   | forward ... | backward ... |   ->   forward: outputs, then a value for each buffer that backward needs
//                                        backward: inputs, of which some lie in such buffers
struct Halves {
  Program first, second;
  size_t first_outputs = 0;    // those of the program that are the first's; the rest is saved
  std::vector<int32_t> saved;  // buffers, as both halves number them
};
// `first_outputs`: how many of the program's outputs belong to the first half. Buffers keep their numbers in both.
Halves split_at(const Program& program, size_t node, size_t first_outputs);

}  // namespace tessera::compiler
