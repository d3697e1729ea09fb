// What the timer itself costs: the floor under every other figure, and the shortest example of a bench.
#include "benchmarks/harness/process_ranks.h"
#include "benchmarks/harness/bench.h"
#include "benchmarks/harness/bench_timer.h"

namespace tessera::cli {

void register_noop(BenchRegistry& registry) {
  registry.add({"noop", "what the timer itself costs", [](const EmitRow& emit) {
                  auto nothing = [] { asm volatile(""); };  // else the loop would vanish
                  auto wall = time_us({}, nothing);
                  emit({.name = "empty/1/-/wall", .unit = "us", .ours = wall.median_us});
                  auto cpu = time_us({.clock = Clock::ThreadCpu}, nothing);
                  emit({.name = "empty/1/-/thread_cpu", .unit = "us", .ours = cpu.median_us});
                  benchmarks::on_process_ranks("noop", 2, emit, [&](testing::Rank&, const EmitRow& emit) {
                    emit({.name = "empty/2/-/wall", .unit = "us", .ours = time_us({}, nothing).median_us});
                  });
                }});
}

}  // namespace tessera::cli
