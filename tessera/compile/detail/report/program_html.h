#pragma once
#include "tessera/compile/detail/ir/program.h"

#include <iosfwd>
#include <string>
#include <vector>

namespace tessera::compiler {

// A program's text by lines, and what each line makes.
struct ProgramLines {
  explicit ProgramLines(const Program& program);
  std::vector<std::string> lines;
  std::vector<int64_t> bytes;  // memory that the line brings: its own results, not views; -1: none
  size_t first_node;           // the line of node 0
};

// The whole text; with an id, so that a script can find its lines.
void write_program(std::ostream& out, const ProgramLines& program, const std::string& id);
// The lines that differ, with a few around them.
void write_diff(std::ostream& out, const ProgramLines& before, const ProgramLines& after);

}  // namespace tessera::compiler
