// A miss of the decision cache, op by op. See dispatch_misses.h.
#include "benchmarks/dispatch_misses.h"

#include "benchmarks/harness/bench_timer.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/propagate/detail/decision.h"

#include <ATen/ATen.h>

#include <algorithm>

namespace tessera::bench {
namespace {

// The tensors of a call: distributed, or plain with the local sizes.
struct MissInputs {
  at::Tensor x, square, image, kernel, batch, row, index, mask;
};

struct MissOp {
  const char* name;
  void (*call)(const MissInputs& t);
};

// No op communicates: dim 0 is sharded over the first axis, and square, kernel and row are replicated.
constexpr MissOp kOps[] = {
    {"abs", [](const MissInputs& t) { t.x.abs(); }},
    {"add", [](const MissInputs& t) { t.x.add(t.x); }},
    {"add_scalar", [](const MissInputs& t) { t.x.add(1.5); }},
    {"addcmul", [](const MissInputs& t) { t.x.addcmul(t.x, t.x); }},
    {"addmm", [](const MissInputs& t) { at::addmm(t.row, t.x, t.square); }},
    {"all", [](const MissInputs& t) { t.mask.all(1); }},
    {"amax", [](const MissInputs& t) { t.x.amax(1); }},
    {"argmax", [](const MissInputs& t) { t.x.argmax(1); }},
    {"avg_pool2d",
     [](const MissInputs& t) {
       at::avg_pool2d(t.image, {2, 2});
     }},
    {"bmm", [](const MissInputs& t) { t.batch.bmm(t.batch); }},
    {"broadcast_mul", [](const MissInputs& t) { t.x.mul(t.row); }},
    {"cat",
     [](const MissInputs& t) {
       at::cat({t.x, t.x}, 1);
     }},
    {"clamp", [](const MissInputs& t) { t.x.clamp(0, 1); }},
    {"clone", [](const MissInputs& t) { t.x.clone(); }},
    {"convolution",
     [](const MissInputs& t) {
       at::convolution(t.image, t.kernel, {}, {1, 1}, {1, 1}, {1, 1}, false, {0, 0}, 1);
     }},
    {"cumsum", [](const MissInputs& t) { t.x.cumsum(1); }},
    {"detach", [](const MissInputs& t) { t.x.detach(); }},
    {"embedding", [](const MissInputs& t) { at::embedding(t.square, t.index); }},
    {"eq", [](const MissInputs& t) { t.x.eq(t.x); }},
    {"exp", [](const MissInputs& t) { t.x.exp(); }},
    {"expand",
     [](const MissInputs& t) {
       t.row.expand({8, 8});
     }},
    {"fft", [](const MissInputs& t) { at::_fft_r2c(t.x, {1}, 0, true); }},
    {"flip", [](const MissInputs& t) { t.x.flip({1}); }},
    {"gather", [](const MissInputs& t) { t.x.gather(1, t.index); }},
    {"gelu", [](const MissInputs& t) { at::gelu(t.x); }},
    {"index_select", [](const MissInputs& t) { t.x.index_select(1, t.row.to(at::kLong)); }},
    {"layer_norm", [](const MissInputs& t) { at::native_layer_norm(t.x, {8}, t.row, t.row, 1e-5); }},
    {"lerp", [](const MissInputs& t) { t.x.lerp(t.x, 0.5); }},
    {"linalg_inv", [](const MissInputs& t) { at::linalg_inv_ex(t.batch); }},
    {"log_softmax", [](const MissInputs& t) { at::_log_softmax(t.x, 1, false); }},
    {"masked_fill", [](const MissInputs& t) { t.x.masked_fill(t.mask, 0.5); }},
    {"max_pool2d",
     [](const MissInputs& t) {
       at::max_pool2d_with_indices(t.image, {2, 2});
     }},
    {"mean", [](const MissInputs& t) { t.x.mean(1); }},
    {"mm", [](const MissInputs& t) { t.x.mm(t.square); }},
    {"mse_loss", [](const MissInputs& t) { at::mse_loss(t.x, t.x, 0); }},
    {"mul_", [](const MissInputs& t) { t.x.mul_(1); }},
    {"ones_like", [](const MissInputs& t) { at::ones_like(t.x); }},
    {"permute",
     [](const MissInputs& t) {
       t.image.permute({0, 2, 3, 1});
     }},
    {"pow", [](const MissInputs& t) { t.x.pow(2); }},
    {"prod", [](const MissInputs& t) { t.x.prod(1); }},
    {"reflection_pad2d",
     [](const MissInputs& t) {
       at::reflection_pad2d(t.image, {1, 1, 1, 1});
     }},
    {"repeat",
     [](const MissInputs& t) {
       t.x.repeat({1, 2});
     }},
    {"reshape",
     [](const MissInputs& t) {
       t.x.reshape({8, 2, 4});
     }},
    {"roll", [](const MissInputs& t) { t.x.roll(1, 1); }},
    {"scatter", [](const MissInputs& t) { t.x.scatter(1, t.index, 0.5); }},
    {"select", [](const MissInputs& t) { t.x.select(1, 0); }},
    {"silu", [](const MissInputs& t) { at::silu(t.x); }},
    {"slice", [](const MissInputs& t) { t.x.slice(1, 0, 4); }},
    {"softmax", [](const MissInputs& t) { at::_softmax(t.x, 1, false); }},
    {"sort", [](const MissInputs& t) { t.x.sort(1); }},
    {"split", [](const MissInputs& t) { t.x.split(4, 1); }},
    {"stack",
     [](const MissInputs& t) {
       at::stack({t.x, t.x}, 1);
     }},
    {"std", [](const MissInputs& t) { t.x.std(1); }},
    {"sum", [](const MissInputs& t) { t.x.sum(1); }},
    {"sum_over_shards", [](const MissInputs& t) { t.x.sum(0); }},
    {"tanh_backward", [](const MissInputs& t) { at::tanh_backward(t.x, t.x); }},
    {"to", [](const MissInputs& t) { t.x.to(at::kDouble); }},
    {"topk", [](const MissInputs& t) { t.x.topk(3, 1); }},
    {"transpose", [](const MissInputs& t) { t.x.transpose(0, 1); }},
    {"tril", [](const MissInputs& t) { t.batch.tril(); }},
    {"unbind", [](const MissInputs& t) { t.x.unbind(1); }},
    {"unsqueeze", [](const MissInputs& t) { t.x.unsqueeze(1); }},
    {"upsample_nearest2d",
     [](const MissInputs& t) {
       at::upsample_nearest2d(t.image, {8, 8});
     }},
    {"view",
     [](const MissInputs& t) {
       t.x.view({8, 2, 4});
     }},
    {"where", [](const MissInputs& t) { at::where(t.mask, t.x, t.x); }},
};

}  // namespace

void time_misses(const DeviceMesh& mesh, const EmitRow& emit) {
  auto& cache = propagate::decision_cache(*mesh.state());
  Placements rows(static_cast<size_t>(mesh.ndim()), Replicate());
  rows[0] = Shard(0);
  const auto sharded = [&](const at::Tensor& t) -> at::Tensor { return distribute_tensor(t, mesh, rows); };
  const auto replicated = [&](const at::Tensor& t) -> at::Tensor { return distribute_tensor(t, mesh); };
  const auto index = at::arange(64).remainder(8).view({8, 8});
  const auto batch = at::eye(4).expand({8, 4, 4}).contiguous();
  const MissInputs t{sharded(at::rand({8, 8})),
                     replicated(at::rand({8, 8})),
                     sharded(at::rand({8, 2, 4, 4})),
                     replicated(at::rand({2, 2, 3, 3})),
                     sharded(batch),
                     replicated(at::rand({8})),
                     sharded(index),
                     sharded(index.gt(3))};
  if (mesh.get_rank() != 0) return;
  const TimerOptions options{.clock = TimerClock::ThreadCpu, .repetitions = 5, .iterations = 100};
  std::vector<std::pair<double, std::string>> costs;
  for (const auto& op : kOps) {
    const auto [miss, hit, clear] = time_alternating(
        options, [&] { cache.clear(), op.call(t); }, [&] { op.call(t); }, [&] { cache.clear(); });
    costs.emplace_back(miss.median_us - clear.median_us - hit.median_us, op.name);
  }
  std::sort(costs.begin(), costs.end());
  const auto ranks = std::to_string(mesh.size());
  emit({.name = "miss_of_" + std::to_string(costs.size()) + "_ops/" + ranks + "/-/median",
        .unit = "us",
        .ours = costs[costs.size() / 2].first});
  for (size_t i = 0; i < 3; i++) {
    const auto& [us, name] = costs[costs.size() - 1 - i];
    emit({.name = "miss_of_" + std::to_string(costs.size()) + "_ops/" + ranks + "/-/" +
                  (i == 0   ? "most"
                   : i == 1 ? "second"
                            : "third"),
          .unit = "us",
          .ours = us,
          .note = name});
  }
}

}  // namespace tessera::bench
