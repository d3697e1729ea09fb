// Predicts the collectives of the layers over tp, by dry runs of small models in a fake world.
#include "tessera/comm/detail/fake_world.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/models/loss.h"
#include "tessera/nn/checkpoint_wrapper.h"
#include "tessera/nn/deferred_init.h"
#include "tessera/optim/detail/local_tensors.h"
#include "tessera/tensor_parallel/loss_parallel.h"
#include "tessera/tensor_parallel/parallelize_module.h"
#include "tessera/train/detail/language_model.h"
#include "tessera/train/detail/plan_traffic.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

namespace tessera::train::planning {
namespace {

using TrafficByKind = std::map<std::string, Traffic>;  // key: "all_reduce in forward"

class TrafficByKindCount final : private comm::Observer {
 public:
  TrafficByKindCount() : scope_(this) {}
  void set_phase(std::string name) { phase_ = std::move(name); }
  const TrafficByKind& seen() const { return seen_; }

 private:
  void on_post(const comm::Record& record) override {
    if (!record.counted()) return;
    auto& traffic = seen_[std::string(record.name()) + phase_];
    traffic.collectives++;
    traffic.bytes += record.bytes;
  }
  std::string phase_;
  TrafficByKind seen_;
  comm::ObserverScope scope_;
};

struct BatchShape {
  int64_t rows, length;
  int64_t tokens() const { return rows * length; }
};

// Allocates the parameters without initializing them: the results are not used. Unwritten pages cost no memory.
void allocate_parameters(torch::nn::Module& root) {
  const at::NoGradGuard no_grad;
  for (auto& p : root.parameters()) {
    if (!is_dtensor(p)) {
      p.set_data(at::empty(p.sizes(), p.scalar_type()));
      continue;
    }
    const auto& spec = *tessera::detail::meta_of(p).spec;
    p.set_data(
        tessera::detail::wrap(at::empty(spec.local_sizes, spec.dtype),
                              intern(spec.mesh, spec.placements, spec.sizes, spec.strides, spec.dtype, at::kCPU)));
  }
}

TrafficByKind run_step(LanguageModel& model, const BatchShape& shape) {
  auto& root = module_of(model);
  root.zero_grad();
  const auto tokens = at::zeros({shape.rows, shape.length}, at::kLong);
  TrafficByKindCount count;
  const LossParallel loss_parallel;
  count.set_phase(" in forward");
  auto loss = models::loss_sum(logits_of(model, tokens).to(at::kFloat), tokens);
  if (is_dtensor(loss)) loss = DTensor(loss).full_tensor();
  count.set_phase(" in backward");
  loss.backward();
  count.set_phase(" of gradients");
  optim::detail::reduce_partial_gradients(root.parameters());
  return count.seen();
}

// Runs one step per batch shape. The data-parallel axes are not needed.
std::vector<TrafficByKind> run_on_tp(const TrainConfig& config, int64_t tp, int64_t blocks,
                                     const std::vector<BatchShape>& shapes) {
  const FakeWorld world(tp);
  const auto mesh = init_device_mesh("cpu", {tp}, {"tp"});
  auto model = deferred_init([&] { return make_language_model(with_blocks(model_config(config.model), blocks)); });
  auto& root = module_of(model);
  if (const auto& precision = config.training.precision; precision != "fp32")
    deferred_init([&] { root.to(precision == "bf16" ? at::kBFloat16 : at::kHalf); });
  parallelize_module(root, mesh, tensor_parallel_plan(config), {.src_data_rank = std::nullopt});
  if (config.training.activation_checkpoint)
    for (const auto& block : blocks_of(model)) checkpoint_wrapper(*block);
  allocate_parameters(root);
  std::vector<TrafficByKind> seen;
  for (const auto& shape : shapes) seen.push_back(run_step(model, shape));
  return seen;
}

// Linear extrapolation: the value at `at` of the line through (x1, y1) and (x2, y2).
int64_t extrapolate(int64_t x1, int64_t y1, int64_t x2, int64_t y2, int64_t at) {
  return y1 + (y2 - y1) / (x2 - x1) * (at - x1);
}
TrafficByKind extrapolate(int64_t x1, const TrafficByKind& y1, int64_t x2, const TrafficByKind& y2, int64_t at) {
  TrafficByKind result;
  const auto value = [](const TrafficByKind& of, const std::string& kind) {
    const auto found = of.find(kind);
    return found == of.end() ? Traffic() : found->second;
  };
  for (const auto& [kind, unused] : y2) {
    const auto a = value(y1, kind), b = value(y2, kind);
    result[kind] = {extrapolate(x1, a.collectives, x2, b.collectives, at), extrapolate(x1, a.bytes, x2, b.bytes, at)};
  }
  return result;
}

TrafficByKind run_with_tokens(const TrainConfig& config, int64_t tp, int64_t rows, int64_t length, int64_t blocks) {
  // Short sequences keep their length, so that uneven shards over tp are as in the real run. Long ones become a short
  // length that is divisible by tp.
  constexpr int64_t kShort = 64;
  const bool is_short = length <= std::max(kShort, 2 * tp);
  const BatchShape one{1, is_short ? length : tp}, two{is_short ? 2 : 1, is_short ? length : 2 * tp};
  const int64_t tokens = rows * (is_short ? length : (length + tp - 1) / tp * tp);
  const auto seen = run_on_tp(config, tp, blocks, {one, two});
  return extrapolate(one.tokens(), seen[0], two.tokens(), seen[1], tokens);
}

// A large vocabulary costs time, and its traffic is linear in its size. The feed-forward dimension causes no traffic.
// The smaller sizes have the same remainder modulo tp, so shards are uneven in the same way.
TrainConfig with_vocab_size(TrainConfig config, int64_t vocab_size, int64_t tp) {
  config.model.vocab_size = vocab_size;
  if (const auto model = model_config(config.model); const auto* llama = std::get_if<models::LlamaConfig>(&model))
    config.model.ffn_dim = std::min(llama->ffn_dim, 8 * tp + llama->ffn_dim % tp);
  return config;
}
TrafficByKind run_with_vocab(const TrainConfig& config, int64_t tp, int64_t rows, int64_t length, int64_t blocks) {
  const auto model = model_config(config.model);
  const int64_t vocab_size = std::visit([](const auto& m) { return m.vocab_size; }, model);
  const int64_t small = 8 * tp + vocab_size % tp, larger = small + 8 * tp;
  const auto with = [&](const TrainConfig& c) { return run_with_tokens(c, tp, rows, length, blocks); };
  if (vocab_size <= larger || !config.parallel.tp_plan.empty()) return with(config);
  return extrapolate(small, with(with_vocab_size(config, small, tp)), larger, with(with_vocab_size(config, larger, tp)),
                     vocab_size);
}

}  // namespace

std::vector<PlannedTraffic> tensor_parallel_traffic(const TrainConfig& config, const MeshShape& mesh) {
  const int64_t tp = extent(mesh, "tp");
  if (tp == 1) return {};
  const int64_t microbatches = config.training.accumulate, data_ranks = extent(mesh, "dp") * extent(mesh, "fsdp");
  const int64_t rows = config.training.batch / data_ranks / microbatches, length = sequence_length(config);
  const int64_t blocks = blocks_in(model_config(config.model));
  const auto with = [&](int64_t n) { return run_with_vocab(config, tp, rows, length, n); };
  // A custom plan may treat each block differently.
  const bool run_all_blocks = blocks <= 2 || !config.parallel.tp_plan.empty();
  std::vector<PlannedTraffic> planned;
  for (const auto& [kind, traffic] : run_all_blocks ? with(blocks) : extrapolate(1, with(1), 2, with(2), blocks)) {
    const int64_t times = kind.ends_with(" of gradients") ? 1 : microbatches;
    planned.push_back({"tp", kind, {traffic.collectives * times, traffic.bytes * times}});
  }
  return planned;
}

}  // namespace tessera::train::planning
