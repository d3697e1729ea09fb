#pragma once
#include "benchmarks/harness/bench.h"
#include "tessera/testing/ranks.h"

#include <functional>
#include <string>

namespace tessera::bench {

using RankBody = std::function<void(testing::Rank& me, const EmitRow& emit)>;

// Runs `body` on `ranks` processes with the shared-memory backend. Emits the rows of rank 0 as they come, on another
// thread. `bench` is the name of the calling benchmark: the child processes execute this program again, up to this
// call.
void run_process_ranks(const std::string& bench, int64_t ranks, const EmitRow& emit, const RankBody& body);

}  // namespace tessera::bench
