#pragma once
#include "tessera/compile/detail/report/compile_trace.h"

#include <iosfwd>
#include <string>

namespace tessera::compiler {

// Writes a self-contained HTML page: passes with matches and times, the diff of each pass, collectives in order, memory
// in use at each node, the largest buffers, generated functions. Program lines can be copied as text that `tessera opt`
// reads.
void trace_page(std::ostream& out, const CompileTrace& trace, const std::string& title);

}  // namespace tessera::compiler
