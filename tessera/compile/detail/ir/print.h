#pragma once
#include "tessera/compile/detail/ir/program.h"

namespace tessera::compiler {

// One line of a program's text, without its end.
void print_node(std::ostream& out, const Program& program, const Node& node);
void print_arg(std::ostream& out, const Program& program, const Arg& arg, bool written = false);
// Which value stands for a buffer in "in %0": the first that lies in it.
std::vector<ValueId> first_in_buffer(const Program& program);

}  // namespace tessera::compiler
