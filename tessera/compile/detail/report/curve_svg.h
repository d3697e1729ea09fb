#pragma once
#include "tessera/compile/detail/report/memory_curve.h"

#include <iosfwd>

namespace tessera::compiler {

// Writes the memory curve as SVG: bytes in use over nodes, the part of them in the arena, a line at the arena's size,
// and a tick per collective.
void write_curve(std::ostream& out, const Program& program, const MemoryCurve& curve, const MemoryPlan& plan);

}  // namespace tessera::compiler
