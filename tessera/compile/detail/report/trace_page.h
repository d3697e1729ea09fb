#pragma once
#include "tessera/compile/detail/report/compile_trace.h"

#include <iosfwd>
#include <string>

namespace tessera::compiler {

// One HTML page that needs nothing beside it: the passes with what they matched and took, what each changed, the
// collectives in order, memory in use at each node, the largest buffers, generated functions. Lines of programs copy as
// text that `tessera opt` reads.
void trace_page(std::ostream& out, const CompileTrace& trace, const std::string& title);

}  // namespace tessera::compiler
