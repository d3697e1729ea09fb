#pragma once
#include "tessera/compile/detail/ir/program.h"

namespace tessera::compiler {

// Prints one line of a program's text, without the newline.
// The lines before the nodes: groups, numbers, kernels, inputs. `sources`: of kernels; false: they are empty.
void print_declarations(std::ostream& out, const Program& program, bool sources = true);
void print_outputs(std::ostream& out, const Program& program);
void print_node(std::ostream& out, const Program& program, const Node& node);
void print_arg(std::ostream& out, const Program& program, const Arg& arg, bool written = false);
// By buffer, the value that names it in "in %0": the first value that is defined in it.
std::vector<ValueId> first_in_buffer(const Program& program);

}  // namespace tessera::compiler
