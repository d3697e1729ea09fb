// The cost of the timer itself: a lower bound of all figures, and the shortest example of a benchmark.
#include "benchmarks/harness/bench.h"
#include "benchmarks/harness/bench_timer.h"
#include "benchmarks/harness/process_ranks.h"

namespace tessera::bench {

void register_noop(BenchRegistry& registry) {
  registry.add({"noop", "cost of the timer itself", [](const EmitRow& emit) {
                  auto nothing = [] { asm volatile(""); };  // keeps the compiler from removing the loop
                  auto wall = time_us({}, nothing);
                  emit({.name = "empty/1/-/wall", .unit = "us", .ours = wall.median_us});
                  auto cpu = time_us({.clock = TimerClock::ThreadCpu}, nothing);
                  emit({.name = "empty/1/-/thread_cpu", .unit = "us", .ours = cpu.median_us});
                  run_process_ranks("noop", 2, emit, [&](testing::Rank&, const EmitRow& emit) {
                    emit({.name = "empty/2/-/wall", .unit = "us", .ours = time_us({}, nothing).median_us});
                  });
                }});
}

}  // namespace tessera::bench
