#pragma once
#include "tessera/compile/detail/report/memory_curve.h"

#include <iosfwd>

namespace tessera::compiler {

// The curve as a picture: memory in use over nodes, the part of it in the arena, a line at the arena's size, a tick at
// every collective.
void write_curve(std::ostream& out, const Program& program, const MemoryCurve& curve, const MemoryPlan& plan);

}  // namespace tessera::compiler
