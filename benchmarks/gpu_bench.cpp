// A train step of GPT-2 124M on one GPU, batches of 4 and 32 sequences of 1024 tokens: forward and backward in bfloat16
// autocast, compiled or not, clipping, and the fused AdamW, in tokens per second. `plain` is the model alone; the
// others go through fully_shard, DistributedDataParallel and parallelize_module on a mesh of one rank, and alternate
// with `plain` in the same run. It prints nothing without a GPU.
#include "benchmarks/harness/bench.h"
#include "tessera/compile/api/compile.h"
#include "tessera/data_parallel/distributed_data_parallel.h"
#include "tessera/data_parallel/fsdp/fully_shard.h"
#include "tessera/models/gpt2.h"
#include "tessera/models/loss.h"
#include "tessera/models/sizes.h"
#include "tessera/optim/adam.h"
#include "tessera/optim/clip_grad.h"
#include "tessera/tensor_parallel/parallelize_module.h"

#include <ATen/Context.h>
#include <ATen/autocast_mode.h>
#include <ATen/ops/randint.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <chrono>
#include <iomanip>
#include <memory>
#include <sstream>

namespace tessera::bench {
namespace gpu_bench {
namespace {

constexpr int64_t kLength = 1024, kRepetitions = 5;

const models::GPT2Config kConfig{.vocab_size = 50304, .n_layer = 12, .n_head = 12, .n_embd = 768};

struct GpuBatch {
  at::Tensor x, y;
  friend void tessera_visit(GpuBatch& b, auto&& field) { field(b.x), field(b.y); }
};

class Bfloat16Autocast {
 public:
  Bfloat16Autocast() {
    at::autocast::set_autocast_enabled(at::kCUDA, true);
    at::autocast::set_autocast_dtype(at::kCUDA, at::kBFloat16);
  }
  ~Bfloat16Autocast() {
    at::autocast::set_autocast_enabled(at::kCUDA, false);
    at::autocast::clear_cache();
  }
  Bfloat16Autocast(const Bfloat16Autocast&) = delete;
};

const auto forward_backward = [](auto& model, const GpuBatch& batch) {
  model->zero_grad();
  at::Tensor loss;
  {
    const Bfloat16Autocast on;
    loss = models::loss(model(batch.x), batch.y);
  }
  loss.backward();
  return loss.detach();
};

void wait_for_gpu() { c10::impl::VirtualGuardImpl(at::kCUDA).synchronizeDevice(0); }

using GpuStep = std::function<void()>;

// The step of a model, with an optimizer of its own.
template <class Holder>
GpuStep step_of(Holder model, bool compiled, const GpuBatch& batch) {
  auto optimizer = std::make_shared<optim::AdamW>(model->parameters(), optim::AdamW::Options{.fused = true});
  const auto finish = [optimizer] {
    optim::clip_grad_norm_(optimizer->parameters(), 1.0);
    optimizer->step();
  };
  if (!compiled)
    return [=]() mutable {
      forward_backward(model, batch);
      finish();
    };
  auto step = compile(forward_backward, {.captures = Captures::None});
  return [=]() mutable {
    step(model, batch);
    finish();
  };
}

models::GPT2 on_gpu() {
  models::GPT2 model(kConfig);
  model->to(at::kCUDA);
  return model;
}

GpuStep make_step(const std::string& how, bool compiled, const DeviceMesh& mesh, const GpuBatch& batch) {
  auto model = on_gpu();
  if (how == "ddp")
    return step_of(DistributedDataParallel<models::GPT2>(model, {.gradient_as_bucket_view = true}), compiled, batch);
  if (how == "fsdp") {
    for (auto& block : model->h) fully_shard(block, {.mesh = mesh});
    fully_shard(model, {.mesh = mesh});
  }
  if (how == "tp") parallelize_module(model, mesh, models::tensor_parallel_plan(kConfig));
  return step_of(model, compiled, batch);
}

double seconds(const GpuStep& step, int64_t steps) {
  wait_for_gpu();
  const auto start = std::chrono::steady_clock::now();
  for (int64_t i = 0; i < steps; i++) step();
  wait_for_gpu();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

void measure(int64_t batch_size, bool compiled, const std::string& how, const DeviceMesh& mesh, const EmitRow& emit) {
  const auto tokens =
      at::randint(kConfig.vocab_size, {batch_size, kLength + 1}, at::device(at::kCUDA).dtype(at::kLong));
  const GpuBatch batch{tokens.narrow(1, 0, kLength).contiguous(), tokens.narrow(1, 1, kLength).contiguous()};
  const int64_t steps = batch_size > 8 ? 6 : 15;
  const std::vector<GpuStep> both = {make_step("plain", compiled, mesh, batch), make_step(how, compiled, mesh, batch)};
  std::vector<std::vector<double>> times(2);
  for (const auto& step : both) seconds(step, 5);
  for (int64_t r = 0; r < kRepetitions; r++)
    for (size_t i = 0; i < 2; i++) times[i].push_back(seconds(both[i], steps));
  const auto rate = [&](std::vector<double>& all) {
    std::sort(all.begin(), all.end());
    return static_cast<double>(steps * batch_size * kLength) / all[all.size() / 2];
  };
  const double plain = rate(times[0]), ours = rate(times[1]);
  std::ostringstream note;
  note << std::fixed << std::setprecision(3) << ours / plain << " of plain";
  emit({.name = c10::str("gpt2/1/", batch_size, "/", how, compiled ? "_compiled" : "_eager"),
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
