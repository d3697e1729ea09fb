#pragma once
#include "benchmarks/harness/bench.h"
#include "tessera/mesh/device_mesh.h"

namespace tessera::bench {

// The cost of a miss of the decision cache for many ops: a call with a miss, less the same call with a hit. Emits the
// median, and the three ops that cost most. All ranks call it, the first one measures; no op communicates.
void time_misses(const DeviceMesh& mesh, const EmitRow& emit);

}  // namespace tessera::bench
