// One step of training (forward, backward, optimizer) with tensor parallelism, one thread a rank: the seeds' MLP
// (10 -> 16 -> 10, batch 8) and a small GPT (peer_gpt.h, batch 4 x 128). Plain is as many independent copies of the
// whole model in LibTorch at once as there are ranks, so that both have the same cores. The variant tp has LibTorch's
// AdamW, tp_fused the fused kernel, on both sides.
#include "benchmarks/peer_gpt.h"
#include "tessera/cli/bench.h"
#include "tessera/cli/bench_timer.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/models/mlp.h"
#include "tessera/tensor_parallel/loss_parallel.h"
#include "tessera/tensor_parallel/parallelize_module.h"
#include "tessera/testing/ranks.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <torch/optim/adamw.h>

#include <algorithm>
#include <array>
#include <functional>
#include <memory>
#include <vector>

namespace tessera::cli {
namespace {

using Step = std::function<void()>;

// LibTorch's optimizer, parameter by parameter, or its fused kernel, which takes all of them at once.
enum class Optimizer { Torch, Fused };

class FusedAdamW {
 public:
  explicit FusedAdamW(const std::vector<at::Tensor>& parameters) {
    at::NoGradGuard no_grad;
    for (const auto& p : parameters) {
      auto& list = lists_[is_dtensor(p)];
      list.parameters.push_back(p);
      list.first.push_back(at::zeros_like(p)), list.second.push_back(at::zeros_like(p));
      list.steps.push_back(at::zeros({}));
    }
  }
  void zero_grad() {
    for (auto& list : lists_)
      for (auto& p : list.parameters) p.mutable_grad().reset();
  }
  void step() {
    at::NoGradGuard no_grad;
    for (auto& list : lists_) {
      if (list.parameters.empty()) continue;
      std::vector<at::Tensor> gradients;
      for (const auto& p : list.parameters) gradients.push_back(p.grad());
      at::_foreach_add_(list.steps, 1);
      at::_fused_adamw_(list.parameters, gradients, list.first, list.second, {}, list.steps, 1e-3, 0.9, 0.999, 0.01,
                        1e-8, /*amsgrad=*/false, /*maximize=*/false);
    }
  }

 private:
  struct List {
    std::vector<at::Tensor> parameters, first, second, steps;
  };
  List lists_[2];  // plain, distributed
};

template <class Adam>
Step train_step(std::shared_ptr<Adam> adam, std::function<at::Tensor()> loss) {
  return [adam, loss = std::move(loss)] {
    adam->zero_grad();
    loss().backward();
    adam->step();
  };
}
Step train_step(Optimizer optimizer, const std::vector<at::Tensor>& parameters, std::function<at::Tensor()> loss) {
  if (optimizer == Optimizer::Fused) return train_step(std::make_shared<FusedAdamW>(parameters), std::move(loss));
  const torch::optim::AdamWOptions options(1e-3);
  return train_step(std::make_shared<torch::optim::AdamW>(parameters, options), std::move(loss));
}

at::Generator same_on_all_ranks() { return at::make_generator<at::CPUGeneratorImpl>(/*seed=*/1); }

struct PlainMlp : torch::nn::Module {
  PlainMlp() { register_module("net1", net1), register_module("net2", net2); }
  at::Tensor forward(const at::Tensor& x) { return net2(at::relu(net1(x))); }
  torch::nn::Linear net1{10, 16}, net2{16, 10};
};

template <class Model>
Step mlp_step(Model model, Optimizer optimizer) {
  const auto x = at::randn({8, 10}, same_on_all_ranks());
  return train_step(optimizer, model->parameters(), [=]() mutable { return model->forward(x).sum(); });
}
Step mlp_ours(Optimizer optimizer, const DeviceMesh& mesh) {
  models::MLP model(models::mlp_module());
  parallelize_module(model, mesh, {{"net1", ColwiseParallel()}, {"net2", RowwiseParallel()}});
  return mlp_step(model, optimizer);
}
Step mlp_plain(Optimizer optimizer) { return mlp_step(std::make_shared<PlainMlp>(), optimizer); }

template <class Layers>
Step gpt_step(std::shared_ptr<benchmarks::PeerGpt<Layers>> model, Optimizer optimizer) {
  const auto tokens = at::randint(256, {4, 129}, same_on_all_ranks(), at::kLong);
  const auto in = tokens.narrow(1, 0, 128).contiguous(), target = tokens.narrow(1, 1, 128).flatten();
  return train_step(optimizer, model->parameters(), [=] {
    const LossParallel scope;  // does nothing to a plain model
    return at::cross_entropy_loss(model->forward(in).flatten(0, 1), target);
  });
}
Step gpt_ours(Optimizer optimizer, const DeviceMesh& mesh) {
  auto model = std::make_shared<benchmarks::PeerGpt<benchmarks::TesseraLayers>>();
  parallelize_module(*model, mesh, benchmarks::peer_gpt_plan());
  return gpt_step(model, optimizer);
}
Step gpt_plain(Optimizer optimizer) {
  return gpt_step(std::make_shared<benchmarks::PeerGpt<benchmarks::TorchLayers>>(), optimizer);
}

struct Case {
  const char* name;
  const char* variant;
  int64_t steps;  // a repetition
  Optimizer optimizer;
  Step (*ours)(Optimizer optimizer, const DeviceMesh& mesh);
  Step (*plain)(Optimizer optimizer);
};
constexpr Case kCases[] = {
    {"mlp", "tp", 300, Optimizer::Torch, mlp_ours, mlp_plain},
    {"gpt", "tp", 2, Optimizer::Torch, gpt_ours, gpt_plain},
    {"mlp", "tp_fused", 300, Optimizer::Fused, mlp_ours, mlp_plain},
    {"gpt", "tp_fused", 2, Optimizer::Fused, gpt_ours, gpt_plain},
};

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
      const auto [ours, plain] = medians_ms<2>(me.group(), c.steps, {c.ours(c.optimizer, mesh), c.plain(c.optimizer)});
      if (me.rank == 0)
        emit({.name = c10::str(c.name, "/", ranks, "/-/", c.variant),
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
