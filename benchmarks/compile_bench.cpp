// Time of a compiled train step and of the same step in eager mode (plain), both with Tessera's fused AdamW: an MLP (10
// -> 16 -> 10, batch 8), a small GPT (peer_gpt.h, batch 4 x 128) and a Llama of similar size, on one rank and on two
// processes with tensor, data and sharded data parallelism. The note has the ratio to eager. All with Numerics::Fast.
// For one rank there are also rows with two threads, with Numerics::Strict, in bfloat16 (autocast over float32
// parameters, and bfloat16 parameters), the peak memory of a step as the CPU
// allocator counts it, and the share of the roof: the rate of the step in its matrix products, divided by the best of a
// product of 2048 x 2048 matrices with as many threads.
//
// first_call: tracing, passes, building kernels and running, in a process that has compiled nothing yet, without and
// with kernels on disk. build: passes, kernels and the plan of memory alone, for 4 and for 48 layers. The note has the
// time of tracing, of the first run, whose memory is new, and of the second.
#include "benchmarks/harness/bench.h"
#include "benchmarks/harness/process_ranks.h"
#include "benchmarks/peer_gpt.h"
#include "benchmarks/peer_mlp.h"
#include "benchmarks/train_step.h"
#include "tessera/base/detail/settings.h"
#include "tessera/compile/api/compile.h"
#include "tessera/compile/detail/passes/pass_observer.h"
#include "tessera/data_parallel/distributed_data_parallel.h"
#include "tessera/data_parallel/fsdp/fully_shard.h"
#include "tessera/models/llama.h"
#include "tessera/models/mlp.h"
#include "tessera/numerics/detail/vector/tiled_product.h"
#include "tessera/optim/adam.h"
#include "tessera/tensor_parallel/loss_parallel.h"
#include "tessera/tensor_parallel/parallelize_module.h"
#include "tessera/testing/detail/counting_allocator.h"

#include <ATen/Parallel.h>
#include <ATen/autocast_mode.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <iomanip>
#include <map>
#include <memory>
#include <optional>
#include <sstream>

namespace tessera::bench {
namespace compile_bench {
namespace {

using Gpt = PeerGpt<TorchLayers>;
using Mlp = PeerMlp;

struct CompileBatch {
  at::Tensor x, y;
  friend void tessera_visit(CompileBatch& b, auto&& field) { field(b.x), field(b.y); }
};

const auto mlp_step = [](auto& model, auto& opt, const CompileBatch& batch) {
  opt.zero_grad();
  auto loss = model.forward(batch.x).sum();
  loss.backward();
  opt.step();
  return loss;
};
const auto gpt_step = [](auto& model, auto& opt, const CompileBatch& batch) {
  const LossParallel scope;  // no effect on a plain model
  opt.zero_grad();
  auto loss = at::cross_entropy_loss(model.forward(batch.x).flatten(0, 1), batch.y);
  loss.backward();
  opt.step();
  return loss;
};
const auto gpt_autocast_step = [](auto& model, auto& opt, const CompileBatch& batch) {
  opt.zero_grad();
  at::autocast::set_autocast_enabled(at::kCPU, true);  // bfloat16
  auto loss = at::cross_entropy_loss(model.forward(batch.x).flatten(0, 1), batch.y);
  at::autocast::clear_cache();
  at::autocast::set_autocast_enabled(at::kCPU, false);
  loss.backward();
  opt.step();
  return loss;
};

models::Llama llama() {
  return models::Llama(models::LlamaConfig{.vocab_size = 256,
                                           .max_seq_len = 128,
                                           .n_layers = 4,
                                           .n_heads = 4,
                                           .n_kv_heads = 4,
                                           .dim = 256,
                                           .ffn_dim = 688,
                                           .rope_theta = 10000});
}

// Times the check of the guards: hot, and directly after a step, when the caches of the processor hold other data.
template <class Step, class Model>
void measure_guards(const std::string& name, int64_t steps, Step& compiled, Model& model, optim::AdamW& opt,
                    const CompileBatch& batch, testing::Rank& me, const EmitRow& emit) {
  using Clock = std::chrono::steady_clock;
  const auto hot = medians_ms(me.group(), 1000, {[&] { compiled.is_cached(model, opt, batch); }});
  std::vector<double> cold;
  for (int64_t i = 0; i < std::max<int64_t>(steps, 10); i++) {
    compiled(model, opt, batch);
    const auto begin = Clock::now();
    compiled.is_cached(model, opt, batch);
    cold.push_back(std::chrono::duration<double, std::micro>(Clock::now() - begin).count());
  }
  std::nth_element(cold.begin(), cold.begin() + static_cast<ptrdiff_t>(cold.size() / 2), cold.end());
  std::ostringstream note;
  note << std::fixed << std::setprecision(1) << "after a step " << cold[cold.size() / 2] << " us";
  if (me.rank == 0) emit({.name = name + "_guards", .unit = "us", .ours = hot[0] * 1000, .note = note.str()});
}

// Times the compiled and the eager step, on two models from `make`. `steps` is per repetition. Returns the time of the
// compiled one.
template <class Make, class F>
double measure(const std::string& name, int64_t steps, const Make& make, const F& step, const CompileBatch& batch,
               testing::Rank& me, const EmitRow& emit,
               const CompileOptions& compile_options = {.numerics = Numerics::Fast}) {
  auto eager = make(), model = make();
  const optim::AdamW::Options options{.fused = true};
  optim::AdamW eager_opt(eager->parameters(), options), opt(model->parameters(), options);
  step(*eager, eager_opt, batch);
  step(*model, opt, batch);
  auto compiled = compile(step, compile_options);
  const auto ms =
      medians_ms(me.group(), steps, {[&] { compiled(*model, opt, batch); }, [&] { step(*eager, eager_opt, batch); }});
  std::ostringstream note;
  note << std::fixed << std::setprecision(2) << ms[0] / ms[1] << " of eager; arena of "
       << compiled.executable().memory();
  if (me.rank == 0) emit({.name = name, .unit = "ms", .ours = ms[0], .plain = ms[1], .note = note.str()});
  measure_guards(name, steps, compiled, *model, opt, batch, me, emit);
  return ms[0];
}

// The data of one rank.
CompileBatch mlp_batch(int64_t rank) { return {at::randn({8, 10}, generator(1 + static_cast<uint64_t>(rank))), {}}; }
CompileBatch gpt_batch(int64_t rank) {
  const auto tokens = at::randint(256, {4, 129}, generator(2 + static_cast<uint64_t>(rank)), at::kLong);
  return {tokens.narrow(1, 0, 128).contiguous(), tokens.narrow(1, 1, 128).flatten()};
}

// Floating-point operations of the matrix products of a GPT step. Linear layers: two per weight and token in forward,
// four in backward. Attention: the same per token and key before it, for q k^T and for the sum of values.
double gpt_product_flops(const PeerGptSizes& s, int64_t batch, int64_t length) {
  const auto weights = s.layers * (4 * s.dim * s.dim + 8 * s.dim * s.dim) + s.dim * s.vocabulary;
  const auto attention = s.layers * s.dim * (length + 1);
  return 6.0 * static_cast<double>(batch * length) * static_cast<double>(weights + attention);
}

// GFLOP/s of a product of 2048 x 2048 matrices, by LibTorch or by Tessera, whichever is faster.
double roof_of_products(testing::Rank& me) {
  constexpr int64_t kSize = 2048;
  const auto a = at::randn({kSize, kSize}), b = at::randn({kSize, kSize});
  auto out = at::empty({kSize, kSize});
  const auto ms =
      medians_ms(me.group(), 1, {[&] { at::mm_out(out, a, b); }, [&] { numerics::tiled_product(out, a, b); }});
  return 2e-6 * kSize * kSize * kSize / std::min(ms[0], ms[1]);
}

void emit_share_of_roof(const std::string& name, double ms, testing::Rank& me, const EmitRow& emit) {
  const auto roof = roof_of_products(me), rate = gpt_product_flops({}, 4, 128) / ms * 1e-6;
  std::ostringstream note;
  note << std::fixed << std::setprecision(0) << rate << " of " << roof << " GFLOP/s";
  emit({.name = name, .unit = "share", .ours = rate / roof, .note = note.str()});
}

// The peak memory of a step: parameters, optimizer state, gradients, activations. A call that is checked beside eager
// mode would need more.
int64_t peak_bytes_of_gpt_step(bool compiled) {
  testing::CountingAllocator count;
  Gpt model;
  optim::AdamW opt(model.parameters(), {.fused = true});
  const auto batch = gpt_batch(0);
  auto step = compile(gpt_step, {.captures = Captures::None, .numerics = Numerics::Fast});
  for (int i = 0; i < 4; i++) {
    count.reset_peak();
    compiled&& i > 0 ? step(model, opt, batch) : gpt_step(model, opt, batch);
  }
  return count.peak_bytes();
}

void emit_memory(const EmitRow& emit) {
  const auto ours = static_cast<double>(peak_bytes_of_gpt_step(true)) * 1e-6,
             eager = static_cast<double>(peak_bytes_of_gpt_step(false)) * 1e-6;
  std::ostringstream note;
  note << std::fixed << std::setprecision(2) << ours / eager << " of eager";
  emit({.name = "gpt/1/-/peak_memory", .unit = "MB", .ours = ours, .plain = eager, .note = note.str()});
}

// A folder for the kernel cache of the ranks that are started meanwhile, empty at first.
class EmptyKernelCache {
 public:
  EmptyKernelCache() {
    if (setting_is_set("TESSERA_SPAWN")) return;  // a rank: its parent has made the folder
    std::string pattern = (std::filesystem::temp_directory_path() / "tessera-bench-cache-XXXXXX").string();
    folder_ = mkdtemp(pattern.data());
    if (setting_is_set("TESSERA_CACHE_DIR")) before_ = setting("TESSERA_CACHE_DIR");
    setenv("TESSERA_CACHE_DIR", folder_.c_str(), 1);
  }
  ~EmptyKernelCache() {
    if (folder_.empty()) return;
    before_ ? setenv("TESSERA_CACHE_DIR", before_->c_str(), 1) : unsetenv("TESSERA_CACHE_DIR");
    std::filesystem::remove_all(folder_);
  }
  EmptyKernelCache(const EmptyKernelCache&) = delete;

 private:
  std::string folder_;
  std::optional<std::string> before_;
};

// Notes when the first pass began, where tracing has ended, and when the executable was built.
struct EndOfTrace : compiler::PassObserver {
  using Clock = std::chrono::steady_clock;
  std::optional<Clock::time_point> at = {};
  Clock::time_point built = {};
  std::map<double, std::string> passes = {};  // by their time
  void after_pass(const compiler::Program&, const compiler::PassReport& report) override {
    const std::chrono::duration<double, std::milli> took(report.milliseconds);
    if (!at) at = Clock::now() - std::chrono::duration_cast<Clock::duration>(took);
    passes[-report.milliseconds] = report.name;
  }
  void after_build() override { built = Clock::now(); }
};

// The first call of a GPT step.
void measure_first_call(const std::string& name, int64_t layers, bool with_trace_and_run, const EmitRow& emit) {
  using Milliseconds = std::chrono::duration<double, std::milli>;
  auto model = std::make_shared<Gpt>(PeerGptSizes{.layers = layers});
  optim::AdamW opt(model->parameters(), {.fused = true});
  const auto batch = gpt_batch(0);
  gpt_step(*model, opt, batch);
  auto compiled = compile(gpt_step, {.captures = Captures::None, .numerics = Numerics::Fast});
  EndOfTrace trace;
  const compiler::PassObserverScope scope(&trace);
  const auto begin = EndOfTrace::Clock::now();
  compiled(*model, opt, batch);
  const auto end = EndOfTrace::Clock::now();
  compiled(*model, opt, batch);
  const Milliseconds all = end - begin, tracing = trace.at.value() - begin, build = trace.built - trace.at.value(),
                     first_run = end - trace.built, run = EndOfTrace::Clock::now() - end;
  std::ostringstream note;
  note << std::fixed << std::setprecision(0) << "tracing " << tracing.count() << ", first run " << first_run.count()
       << ", second " << run.count() << ", longest passes";
  size_t shown = 0;
  for (const auto& [ms, pass] : trace.passes)
    if (shown++ < 3) note << " " << pass << " " << -ms;
  emit({.name = name, .unit = "ms", .ours = (with_trace_and_run ? all : build).count(), .note = note.str()});
}

void run_one_rank(testing::Rank& me, const EmitRow& emit) {
  const auto mlp = [] { return std::make_shared<Mlp>(); };
  const auto gpt = [] { return std::make_shared<Gpt>(); };
  const CompileOptions strict{.numerics = Numerics::Strict};
  measure("mlp/1/-/step", 1000, mlp, mlp_step, mlp_batch(0), me, emit);
  measure("mlp/1/-/strict", 1000, mlp, mlp_step, mlp_batch(0), me, emit, strict);
  const auto ms = measure("gpt/1/-/step", 3, gpt, gpt_step, gpt_batch(0), me, emit);
  emit({.name = "gpt/1/-/jax", .unit = "ms", .ours = ms, .note = "the same step; the peer is JAX"});
  emit_share_of_roof("gpt/1/-/share_of_roof", ms, me, emit);
  measure("llama/1/-/step", 3, llama, gpt_step, gpt_batch(0), me, emit);
  const auto gpt_bf16 = [] {
    auto model = std::make_shared<Gpt>();
    model->to(at::kBFloat16);
    return model;
  };
  measure("gpt/1/-/bf16_autocast", 3, gpt, gpt_autocast_step, gpt_batch(0), me, emit);
  measure("gpt/1/-/bf16_parameters", 3, gpt_bf16, gpt_step, gpt_batch(0), me, emit);
  measure("gpt/1/-/strict", 3, gpt, gpt_step, gpt_batch(0), me, emit, strict);
  emit_memory(emit);
  const auto threads = at::get_num_threads();
  at::set_num_threads(2);
  const auto ms2 = measure("gpt/1/-/two_threads", 3, gpt, gpt_step, gpt_batch(0), me, emit);
  emit({.name = "gpt/1/-/two_threads_jax", .unit = "ms", .ours = ms2, .note = "the same step; the peer is JAX"});
  emit_share_of_roof("gpt/1/-/share_of_roof_two_threads", ms2, me, emit);
  const auto llama_ms = measure("llama/1/-/two_threads", 3, llama, gpt_step, gpt_batch(0), me, emit);
  emit({.name = "llama/1/-/two_threads_jax", .unit = "ms", .ours = llama_ms, .note = "the same step; the peer is JAX"});
  at::set_num_threads(threads);
}

void run_tensor_parallel(testing::Rank& me, const EmitRow& emit) {
  const auto mesh = me.mesh({me.size()}, {"tp"});
  const auto mlp = [&] {
    models::MLP model(models::mlp_module());
    parallelize_module(model, mesh, {{"net1", ColwiseParallel()}, {"net2", RowwiseParallel()}});
    return model;
  };
  const auto gpt = [&] {
    auto model = std::make_shared<PeerGpt<TesseraLayers>>();
    parallelize_module(*model, mesh, peer_gpt_plan());
    return model;
  };
  measure(c10::str("mlp/", me.size(), "/-/tp"), 300, mlp, mlp_step, mlp_batch(0), me, emit);
  measure(c10::str("gpt/", me.size(), "/-/tp"), 3, gpt, gpt_step, gpt_batch(0), me, emit);
}

// DDP with default options: the reducer's buckets.
void run_data_parallel(testing::Rank& me, const EmitRow& emit) {
  const auto mlp = [] { return DistributedDataParallel(std::make_shared<Mlp>()); };
  const auto gpt = [] { return DistributedDataParallel(std::make_shared<Gpt>()); };
  measure(c10::str("mlp/", me.size(), "/-/ddp"), 300, mlp, mlp_step, mlp_batch(me.rank), me, emit);
  measure(c10::str("gpt/", me.size(), "/-/ddp"), 3, gpt, gpt_step, gpt_batch(me.rank), me, emit);
}

// One unit per block and one for the rest.
void run_sharded_data_parallel(testing::Rank& me, const EmitRow& emit) {
  const auto mlp = [] {
    models::MLP model(models::mlp_module());
    fully_shard(model);
    return model;
  };
  const auto gpt = [] {
    Holder<PeerGpt<TesseraLayers>> model;
    for (auto& block : model->blocks) fully_shard(block);
    fully_shard(model);
    return model;
  };
  measure(c10::str("mlp/", me.size(), "/-/fsdp"), 300, mlp, mlp_step, mlp_batch(me.rank), me, emit);
  measure(c10::str("gpt/", me.size(), "/-/fsdp"), 3, gpt, gpt_step, gpt_batch(me.rank), me, emit);
}

void run_first_calls(const EmitRow& emit) {
  const EmptyKernelCache cache;
  for (const auto* name : {"gpt/1/-/first_call_cold", "gpt/1/-/first_call_cached"})
    run_process_ranks("compile", 1, emit,
                      [&](testing::Rank&, const EmitRow& to) { measure_first_call(name, 4, true, to); });
}
void run_builds(const EmitRow& emit) {
  for (const int64_t layers : {4, 48}) {
    const EmptyKernelCache cache;
    run_process_ranks("compile", 1, emit, [&](testing::Rank&, const EmitRow& to) {
      measure_first_call(c10::str("gpt/1/-/build_", layers, "_layers"), layers, false, to);
    });
  }
}

void run(const EmitRow& emit) {
  run_process_ranks("compile", 1, emit, run_one_rank);
  run_process_ranks("compile", 2, emit, run_tensor_parallel);
  run_process_ranks("compile", 2, emit, run_data_parallel);
  run_process_ranks("compile", 2, emit, run_sharded_data_parallel);
  run_first_calls(emit);
  run_builds(emit);
}

}  // namespace
}  // namespace compile_bench

void register_compile(BenchRegistry& registry) {
  registry.add({"compile", "compiled train step and the eager one", compile_bench::run});
}

}  // namespace tessera::bench
