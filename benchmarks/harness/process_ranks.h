#pragma once
#include "benchmarks/harness/bench.h"
#include "tessera/testing/ranks.h"

#include <functional>
#include <string>

namespace tessera::benchmarks {

using RankBody = std::function<void(testing::Rank& me, const cli::EmitRow& emit)>;

// Runs `body` on as many processes, joined by shared memory; what rank 0 emits is emitted here, once all have ended.
// `bench` is the bench that calls: the children are this program again, and run it up to this call.
void on_process_ranks(const std::string& bench, int64_t ranks, const cli::EmitRow& emit, const RankBody& body);

}  // namespace tessera::benchmarks
