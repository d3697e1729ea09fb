// A train step of GPT-2 124M on one GPU (gpt2_step.h), batches of 4 and 32 sequences of 1024 tokens, compiled or not,
// in tokens per second. `plain` is the model alone; the others go through fully_shard, DistributedDataParallel and
// parallelize_module on a mesh of one rank, and alternate with `plain` in the same run. It prints nothing without a
// GPU.
#include "benchmarks/gpt2_step.h"
#include "benchmarks/harness/bench.h"

#include <ATen/Context.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <chrono>
#include <iomanip>
#include <sstream>

namespace tessera::bench {
namespace gpu_bench {
namespace {

constexpr int64_t kRepetitions = 5;

void wait_for_gpu() { c10::impl::VirtualGuardImpl(at::kCUDA).synchronizeDevice(0); }

double seconds(const Step& step, int64_t steps) {
  wait_for_gpu();
  const auto start = std::chrono::steady_clock::now();
  for (int64_t i = 0; i < steps; i++) step();
  wait_for_gpu();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

void measure(int64_t batch, bool compiled, const std::string& how, const DeviceMesh& mesh, const EmitRow& emit) {
  const Gpt2Case of{.config = {.vocab_size = 50304, .n_layer = 12, .n_head = 12, .n_embd = 768},
                    .device = at::kCUDA,
                    .batch = batch,
                    .length = 1024};
  const int64_t steps = batch > 8 ? 6 : 15;
  const std::vector<Step> both = {gpt2_step(of, "plain", compiled, mesh), gpt2_step(of, how, compiled, mesh)};
  std::vector<std::vector<double>> times(2);
  for (const auto& step : both) seconds(step, 5);
  for (int64_t r = 0; r < kRepetitions; r++)
    for (size_t i = 0; i < 2; i++) times[i].push_back(seconds(both[i], steps));
  const auto rate = [&](std::vector<double>& all) {
    std::sort(all.begin(), all.end());
    return static_cast<double>(steps * batch * of.length) / all[all.size() / 2];
  };
  const double plain = rate(times[0]), ours = rate(times[1]);
  std::ostringstream note;
  note << std::fixed << std::setprecision(3) << ours / plain << " of plain";
  emit({.name = c10::str("gpt2/1/", batch, "/", how, compiled ? "_compiled" : "_eager"),
        .unit = "tokens/s",
        .ours = ours,
        .plain = plain,
        .note = note.str()});
}

}  // namespace
}  // namespace gpu_bench

void register_gpu(BenchRegistry& registry) {
  registry.add(
      {"gpu", "GPT-2 124M on one GPU: plain, and through each parallelism on a mesh of one", [](const EmitRow& emit) {
         if (!at::globalContext().hasCUDA()) return;
         const auto world = init();
         const auto mesh = init_device_mesh(world, "cuda", {1}, {"one"});
         for (const int64_t batch : {4, 32})
           for (const bool compiled : {false, true})
             for (const std::string how : {"fsdp", "ddp", "tp"}) try {
                 gpu_bench::measure(batch, compiled, how, mesh, emit);
               } catch (const std::exception& error) {
                 emit({.name = c10::str("gpt2/1/", batch, "/", how, compiled ? "_compiled" : "_eager"),
                       .unit = "tokens/s",
                       .note = error.what()});
               }
         destroy();
       }});
}

}  // namespace tessera::bench
