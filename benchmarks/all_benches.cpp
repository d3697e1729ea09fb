// All benchmarks of `tessera bench`. A benchmark is a file x_bench.cpp with one register function.
#include "benchmarks/harness/bench.h"

namespace tessera::bench {

void register_checkpoint(BenchRegistry& registry);  // checkpoint_bench.cpp
void register_comm(BenchRegistry& registry);        // comm_bench.cpp
void register_compile(BenchRegistry& registry);     // compile_bench.cpp
void register_context(BenchRegistry& registry);     // context_bench.cpp
void register_ddp(BenchRegistry& registry);         // ddp_bench.cpp
void register_dispatch(BenchRegistry& registry);    // dispatch_bench.cpp
void register_fsdp(BenchRegistry& registry);        // fsdp_bench.cpp
void register_gpu(BenchRegistry& registry);         // gpu_bench.cpp
void register_memory(BenchRegistry& registry);      // memory_bench.cpp
void register_noop(BenchRegistry& registry);        // noop_bench.cpp
void register_numerics(BenchRegistry& registry);    // numerics_bench.cpp
void register_optim(BenchRegistry& registry);       // optim_bench.cpp
void register_pipeline(BenchRegistry& registry);    // pipeline_bench.cpp
void register_tp(BenchRegistry& registry);          // tp_bench.cpp

void register_all_benches(BenchRegistry& registry) {
  register_checkpoint(registry);
  register_comm(registry);
  register_compile(registry);
  register_context(registry);
  register_ddp(registry);
  register_dispatch(registry);
  register_fsdp(registry);
  register_gpu(registry);
  register_memory(registry);
  register_noop(registry);
  register_numerics(registry);
  register_optim(registry);
  register_pipeline(registry);
  register_tp(registry);
}

}  // namespace tessera::bench
