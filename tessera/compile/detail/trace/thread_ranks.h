#pragma once
#include "tessera/comm/world.h"

namespace tessera::compiler {

// True if other ranks are threads of this process. They may read the same tensors and draw from the same generator
// while this rank traces.
inline bool ranks_are_threads() {
  return World::has_current() && World::current().backend() == "threads" && World::current().size() > 1;
}

}  // namespace tessera::compiler
