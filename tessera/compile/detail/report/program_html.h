#pragma once
#include "tessera/compile/detail/ir/program.h"

#include <iosfwd>
#include <string>
#include <vector>

namespace tessera::compiler {

// A program's text by lines, and the memory that each line allocates.
struct ProgramLines {
  explicit ProgramLines(const Program& program);
  std::vector<std::string> lines;
  std::vector<int64_t> bytes;  // that the line allocates; -1: none
  size_t first_node;           // the line of node 0
};

// Writes all lines. The script finds them by `id`.
void write_program(std::ostream& out, const ProgramLines& program, const std::string& id);
// Writes the lines that differ, with two lines of context.
void write_diff(std::ostream& out, const ProgramLines& before, const ProgramLines& after);

}  // namespace tessera::compiler
