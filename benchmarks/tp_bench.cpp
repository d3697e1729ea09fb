// One step of training (forward, backward, optimizer) with tensor parallelism, one thread a rank: the seeds' MLP
// (10 -> 16 -> 10, batch 8) and a small GPT (peer_gpt.h, batch 4 x 128). Plain is as many independent copies of the
// whole model in LibTorch at once as there are ranks, so that both have the same cores.
#include "benchmarks/peer_gpt.h"
#include "tessera/cli/bench.h"
#include "tessera/cli/bench_timer.h"
#include "tessera/models/mlp.h"
#include "tessera/tensor_parallel/loss_parallel.h"
#include "tessera/tensor_parallel/parallelize_module.h"
#include "tessera/testing/ranks.h"

#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/relu.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>

#include <functional>

namespace tessera::cli {
namespace {

using Step = std::function<void()>;

struct Case {
  const char* name;
  int64_t steps;  // a repetition
  std::function<Step(const DeviceMesh& mesh)> ours;
  std::function<Step()> plain;
};

template <class Model>
Step mlp_step(Model model) {
  auto adam = std::make_shared<torch::optim::Adam>(model->parameters(), torch::optim::AdamOptions(1e-3));
  const auto x = at::randn({8, 10});
  return [=]() mutable {
    adam->zero_grad();
    model->forward(x).sum().backward();
    adam->step();
  };
}

Step mlp_ours(const DeviceMesh& mesh) {
  models::MLP model(models::mlp_module());
  parallelize_module(model, mesh, {{"net1", ColwiseParallel()}, {"net2", RowwiseParallel()}});
  return mlp_step(model);
}

struct PlainMlp : torch::nn::Module {
  PlainMlp() { register_module("net1", net1), register_module("net2", net2); }
  at::Tensor forward(const at::Tensor& x) { return net2(at::relu(net1(x))); }
  torch::nn::Linear net1{10, 16}, net2{16, 10};
};
Step mlp_plain() { return mlp_step(std::make_shared<PlainMlp>()); }

template <class Model>
Step gpt_step(std::shared_ptr<Model> model) {
  auto adam = std::make_shared<torch::optim::AdamW>(model->parameters(), torch::optim::AdamWOptions(1e-3));
  const auto tokens = at::randint(256, {4, 129}, at::kLong);
  const auto in = tokens.narrow(1, 0, 128).contiguous(), target = tokens.narrow(1, 1, 128).flatten();
  return [=] {
    adam->zero_grad();
    const LossParallel scope;
    at::cross_entropy_loss(model->forward(in).flatten(0, 1), target).backward();
    adam->step();
  };
}

// n1 and n2 hand out distributed tensors, so that the gradients of q, k and v are added up before they are summed over
// the ranks: one all-reduce instead of three.
Step gpt_ours(const DeviceMesh& mesh) {
  auto model = std::make_shared<benchmarks::PeerGpt<benchmarks::TesseraLayers>>();
  const PrepareModuleOutput whole{Replicate(), Replicate(), /*use_local_output=*/false};
  const ColwiseParallel heads{.block = 64};
  const RowwiseParallel from_heads{.block = 64};
  parallelize_module(*model, mesh,
                     {{"b.*.n1", whole},
                      {"b.*.[qkv]", heads},
                      {"b.*.o", from_heads},
                      {"b.*.w1", ColwiseParallel()},
                      {"b.*.w2", RowwiseParallel()},
                      {"out", ColwiseParallel{.use_local_output = false}}});
  return gpt_step(model);
}
Step gpt_plain() { return gpt_step(std::make_shared<benchmarks::PeerGpt<benchmarks::TorchLayers>>()); }

const Case kCases[] = {{"mlp", 300, mlp_ours, mlp_plain}, {"gpt", 2, gpt_ours, gpt_plain}};

// By turns, all ranks at once: a repetition begins and ends with all of them.
template <size_t n>
std::array<double, n> medians_ms(const comm::Group& group, int64_t steps, const std::array<Step, n>& functions) {
  constexpr int kRepetitions = 9;
  std::array<std::vector<double>, n> samples;
  for (int repetition = -1; repetition < kRepetitions; repetition++)  // the first one warms up
    for (size_t i = 0; i < n; i++) {
      group->barrier().wait();
      const double start = now_us(Clock::Wall);
      for (int64_t step = 0; step < steps; step++) functions[i]();
      group->barrier().wait();
      if (repetition >= 0) samples[i].push_back((now_us(Clock::Wall) - start) * 1e-3 / static_cast<double>(steps));
    }
  std::array<double, n> medians;
  for (size_t i = 0; i < n; i++) {
    std::sort(samples[i].begin(), samples[i].end());
    medians[i] = samples[i][samples[i].size() / 2];
  }
  return medians;
}

void run(int64_t ranks, const EmitRow& emit) {
  testing::run_ranks(ranks, [&](testing::Rank& me) {
    const auto mesh = me.mesh({ranks}, {"tp"});
    for (const auto& c : kCases) {
      const auto [ours, plain] = medians_ms<2>(me.group(), c.steps, {c.ours(mesh), c.plain()});
      if (me.rank == 0)
        emit({.name = c10::str(c.name, "/", ranks, "/-/tp"),
              .unit = "ms",
              .ours = ours,
              .plain = plain,
              .note = "ranks are threads"});
    }
  });
}

}  // namespace

void register_tp(BenchRegistry& registry) {
  registry.add({"tp", "a training step with tensor parallelism", [](const EmitRow& emit) {
                  run(2, emit);
                  run(4, emit);
                }});
}

}  // namespace tessera::cli
