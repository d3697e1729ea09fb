// One step of training as a program beside the same step run eagerly, both with our fused AdamW: the seeds' MLP
// (10 -> 16 -> 10, batch 8) and a small GPT (peer_gpt.h, batch 4 x 128), one rank. The note has what the first call
// takes: tracing, passes, building kernels, running.
#include "benchmarks/peer_gpt.h"
#include "benchmarks/peer_mlp.h"
#include "benchmarks/process_ranks.h"
#include "benchmarks/train_step.h"
#include "tessera/cli/bench.h"
#include "tessera/compile/compile.h"
#include "tessera/optim/adam.h"

#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>

#include <chrono>
#include <memory>
#include <sstream>

namespace tessera::cli {
namespace {

using Gpt = benchmarks::PeerGpt<benchmarks::TorchLayers>;
using Mlp = benchmarks::PeerMlp;

struct Batch {
  at::Tensor x, y;
  friend void tessera_visit(Batch& b, auto&& field) { field(b.x), field(b.y); }
};

const auto mlp_step = [](auto& model, auto& opt, const Batch& batch) {
  opt.zero_grad();
  auto loss = model.forward(batch.x).sum();
  loss.backward();
  opt.step();
  return loss;
};
const auto gpt_step = [](auto& model, auto& opt, const Batch& batch) {
  opt.zero_grad();
  auto loss = at::cross_entropy_loss(model.forward(batch.x).flatten(0, 1), batch.y);
  loss.backward();
  opt.step();
  return loss;
};

template <class Model, class F>
void measure(const char* name, int64_t steps, const F& step, const Batch& batch, testing::Rank& me,
             const EmitRow& emit) {
  auto eager = std::make_shared<Model>(), model = std::make_shared<Model>();
  const optim::AdamW::Options options{.fused = true};
  optim::AdamW eager_opt(eager->parameters(), options), opt(model->parameters(), options);
  step(*eager, eager_opt, batch);
  step(*model, opt, batch);
  auto compiled = compile(step);
  const auto begin = std::chrono::steady_clock::now();
  compiled(*model, opt, batch);
  const std::chrono::duration<double, std::milli> first = std::chrono::steady_clock::now() - begin;
  const auto ms = benchmarks::medians_ms(
      me.group(), steps, {[&] { compiled(*model, opt, batch); }, [&] { step(*eager, eager_opt, batch); }});
  std::ostringstream note;
  note << "first call " << first.count() << " ms; arena of " << compiled.executable().memory();
  emit({.name = c10::str(name, "/1/-/step"), .unit = "ms", .ours = ms[0], .plain = ms[1], .note = note.str()});
}

void run(const EmitRow& emit) {
  benchmarks::on_process_ranks("compile", 1, emit, [&](testing::Rank& me, const EmitRow& emit) {
    measure<Mlp>("mlp", 1000, mlp_step, {at::randn({8, 10}, benchmarks::generator(1)), {}}, me, emit);
    const auto tokens = at::randint(256, {4, 129}, benchmarks::generator(2), at::kLong);
    measure<Gpt>("gpt", 3, gpt_step, {tokens.narrow(1, 0, 128).contiguous(), tokens.narrow(1, 1, 128).flatten()}, me,
                 emit);
  });
}

}  // namespace

void register_compile(BenchRegistry& registry) {
  registry.add({"compile", "a training step as a program, beside the eager one", run});
}

}  // namespace tessera::cli
