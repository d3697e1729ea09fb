// Time of a train step (forward, backward, optimizer) with tensor parallelism, one thread per rank: an MLP (10 -> 16 ->
// 10, batch 8) and a small GPT (peer_gpt.h, batch 4 x 128). Plain runs one independent LibTorch copy of the full model
// per rank at the same time, so both sides have the same cores. The variant tp has LibTorch's AdamW, tp_fused the fused
// kernel, on both sides.
#include "benchmarks/harness/bench.h"
#include "benchmarks/harness/process_ranks.h"
#include "benchmarks/peer_gpt.h"
#include "benchmarks/peer_mlp.h"
#include "benchmarks/train_step.h"
#include "tessera/models/mlp.h"
#include "tessera/tensor_parallel/loss_parallel.h"
#include "tessera/tensor_parallel/parallelize_module.h"

#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>

#include <memory>

namespace tessera::bench {
namespace tp_bench {
namespace {

at::Generator same_on_all_ranks() { return generator(1); }

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
Step mlp_plain(Optimizer optimizer) { return mlp_step(std::make_shared<PeerMlp>(), optimizer); }

template <class Layers>
Step gpt_step(std::shared_ptr<PeerGpt<Layers>> model, Optimizer optimizer) {
  const auto tokens = at::randint(256, {4, 129}, same_on_all_ranks(), at::kLong);
  const auto in = tokens.narrow(1, 0, 128).contiguous(), target = tokens.narrow(1, 1, 128).flatten();
  return train_step(optimizer, model->parameters(), [=] {
    const LossParallel scope;  // no effect on a plain model
    return at::cross_entropy_loss(model->forward(in).flatten(0, 1), target);
  });
}
Step gpt_ours(Optimizer optimizer, const DeviceMesh& mesh) {
  auto model = std::make_shared<PeerGpt<TesseraLayers>>();
  parallelize_module(*model, mesh, peer_gpt_plan());
  return gpt_step(model, optimizer);
}
Step gpt_plain(Optimizer optimizer) { return gpt_step(std::make_shared<PeerGpt<TorchLayers>>(), optimizer); }

struct Case {
  StepCase step;
  Optimizer optimizer;
  Step (*ours)(Optimizer optimizer, const DeviceMesh& mesh);
  Step (*plain)(Optimizer optimizer);
};
constexpr Case kCases[] = {
    {{"mlp", "tp", 300}, Optimizer::Torch, mlp_ours, mlp_plain},
    {{"gpt", "tp", 2}, Optimizer::Torch, gpt_ours, gpt_plain},
    {{"mlp", "tp_fused", 300}, Optimizer::Fused, mlp_ours, mlp_plain},
    {{"gpt", "tp_fused", 2}, Optimizer::Fused, gpt_ours, gpt_plain},
};

void run(int64_t ranks, const EmitRow& emit) {
  run_process_ranks("tp", ranks, emit, [&](testing::Rank& me, const EmitRow& emit) {
    const auto mesh = me.mesh({ranks}, {"tp"});
    for (const auto& c : kCases) emit_step_row(me, c.step, c.ours(c.optimizer, mesh), c.plain(c.optimizer), emit);
  });
}

}  // namespace
}  // namespace tp_bench

void register_tp(BenchRegistry& registry) {
  registry.add({"tp", "train step with tensor parallelism", [](const EmitRow& emit) {
                  tp_bench::run(2, emit);
                  tp_bench::run(4, emit);
                }});
}

}  // namespace tessera::bench
