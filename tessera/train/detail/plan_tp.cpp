// Dry runs: which collectives layers post over tp, and in which order gradients come.
#include "tessera/comm/detail/fake_world.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/models/loss.h"
#include "tessera/nn/checkpoint_wrapper.h"
#include "tessera/nn/deferred_init.h"
#include "tessera/optim/detail/local_tensors.h"
#include "tessera/tensor_parallel/loss_parallel.h"
#include "tessera/tensor_parallel/parallelize_module.h"
#include "tessera/train/detail/network.h"
#include "tessera/train/detail/plan_traffic.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

namespace tessera::train::planning {
namespace {

using ByKind = std::map<std::string, Traffic>;  // "all_reduce in forward"

class KindCount final : private comm::Observer {
 public:
  KindCount() : scope_(this) {}
  void phase(std::string name) { phase_ = std::move(name); }
  const ByKind& seen() const { return seen_; }

 private:
  void on_post(const comm::Record& record) override {
    if (!record.counted()) return;
    auto& traffic = seen_[std::string(record.name()) + phase_];
    traffic.collectives++;
    traffic.bytes += record.bytes;
  }
  std::string phase_;
  ByKind seen_;
  comm::ObserverScope scope_;
};

struct Tokens {
  int64_t rows, length;
  int64_t count() const { return rows * length; }
};

// Memory for parameters, with whatever is in it: nobody looks at results. Pages that are never written to cost nothing.
void give_memory(torch::nn::Module& root) {
  const at::NoGradGuard no_grad;
  for (auto& p : root.parameters()) {
    if (!is_dtensor(p)) {
      p.set_data(at::empty(p.sizes(), p.scalar_type()));
      continue;
    }
    const auto& spec = *detail::meta_of(p).spec;
    p.set_data(detail::wrap(at::empty(spec.local_sizes, spec.dtype),
                            intern(spec.mesh, spec.placements, spec.sizes, spec.strides, spec.dtype, at::kCPU)));
  }
}

ByKind run_step(Network& network, const Tokens& size) {
  auto& root = module_of(network);
  root.zero_grad();
  const auto tokens = at::zeros({size.rows, size.length}, at::kLong);
  KindCount count;
  const LossParallel keeps_logits_cut;
  count.phase(" in forward");
  auto loss = models::loss_sum(logits_of(network, tokens).to(at::kFloat), tokens);
  if (is_dtensor(loss)) loss = DTensor(loss).full_tensor();
  count.phase(" in backward");
  loss.backward();
  count.phase(" of gradients");
  optim::detail::summed_gradients(root.parameters());
  return count.seen();
}

// Steps with each number of tokens. Axes of data parallelism take no part.
std::vector<ByKind> run_on_tp(const TrainConfig& config, int64_t tp, int64_t blocks, const std::vector<Tokens>& sizes) {
  const FakeWorld world(tp);
  const auto mesh = init_device_mesh("cpu", {tp}, {"tp"});
  auto network = deferred_init([&] { return make_network(with_blocks(model_config(config.model), blocks)); });
  auto& root = module_of(network);
  if (const auto& precision = config.training.precision; precision != "fp32")
    deferred_init([&] { root.to(precision == "bf16" ? at::kBFloat16 : at::kHalf); });
  parallelize_module(root, mesh, tensor_parallel_plan(config), {.src_data_rank = std::nullopt});
  if (config.training.activation_checkpoint)
    for (const auto& block : blocks_of(network)) checkpoint_wrapper(*block);
  give_memory(root);
  std::vector<ByKind> seen;
  for (const auto& size : sizes) seen.push_back(run_step(network, size));
  return seen;
}

// At `at` on the line through (x1, y1) and (x2, y2).
int64_t along(int64_t x1, int64_t y1, int64_t x2, int64_t y2, int64_t at) {
  return y1 + (y2 - y1) / (x2 - x1) * (at - x1);
}
ByKind along(int64_t x1, const ByKind& y1, int64_t x2, const ByKind& y2, int64_t at) {
  ByKind result;
  const auto value = [](const ByKind& of, const std::string& kind) {
    const auto found = of.find(kind);
    return found == of.end() ? Traffic() : found->second;
  };
  for (const auto& [kind, unused] : y2) {
    const auto a = value(y1, kind), b = value(y2, kind);
    result[kind] = {along(x1, a.collectives, x2, b.collectives, at), along(x1, a.bytes, x2, b.bytes, at)};
  }
  return result;
}

ByKind run_with_tokens(const TrainConfig& config, int64_t tp, int64_t rows, int64_t length, int64_t blocks) {
  // Short rows as they are, so that what does not divide by tp is as it will be. Of long ones a part, that divides.
  constexpr int64_t kShort = 64;
  const bool is_short = length <= std::max(kShort, 2 * tp);
  const Tokens one{1, is_short ? length : tp}, two{is_short ? 2 : 1, is_short ? length : 2 * tp};
  const int64_t tokens = rows * (is_short ? length : (length + tp - 1) / tp * tp);
  const auto seen = run_on_tp(config, tp, blocks, {one, two});
  return along(one.count(), seen[0], two.count(), seen[1], tokens);
}

// Large tables of words cost time, and what is sent of them is linear in the words; of the inner width of a
// feed-forward layer nothing is sent. Smaller ones leave the same rest when they are cut.
TrainConfig with_fewer(TrainConfig config, int64_t words, int64_t tp) {
  config.model.vocab_size = words;
  if (const auto model = model_config(config.model); const auto* llama = std::get_if<models::LlamaConfig>(&model))
    config.model.ffn_dim = std::min(llama->ffn_dim, 8 * tp + llama->ffn_dim % tp);
  return config;
}
ByKind run_with_words(const TrainConfig& config, int64_t tp, int64_t rows, int64_t length, int64_t blocks) {
  const auto model = model_config(config.model);
  const int64_t words = std::visit([](const auto& m) { return m.vocab_size; }, model);
  const int64_t few = 8 * tp + words % tp, more = few + 8 * tp;
  const auto with = [&](const TrainConfig& c) { return run_with_tokens(c, tp, rows, length, blocks); };
  if (words <= more || !config.parallel.tp_plan.empty()) return with(config);
  return along(few, with(with_fewer(config, few, tp)), more, with(with_fewer(config, more, tp)), words);
}

}  // namespace

std::vector<PlannedTraffic> layers_over_tp(const TrainConfig& config, const MeshShape& mesh) {
  const int64_t tp = extent(mesh, "tp");
  if (tp == 1) return {};
  const int64_t parts = config.training.accumulate, data_ranks = extent(mesh, "dp") * extent(mesh, "fsdp");
  const int64_t rows = config.training.batch / data_ranks / parts, length = sequence_length(config);
  const int64_t blocks = blocks_in(model_config(config.model));
  const auto with = [&](int64_t n) { return run_with_words(config, tp, rows, length, n); };
  // A plan of one's own may name blocks one by one.
  const bool each = blocks <= 2 || !config.parallel.tp_plan.empty();
  std::vector<PlannedTraffic> rows_of_table;
  for (const auto& [kind, traffic] : each ? with(blocks) : along(1, with(1), 2, with(2), blocks)) {
    const int64_t times = kind.ends_with(" of gradients") ? 1 : parts;
    rows_of_table.push_back({"tp", kind, {traffic.collectives * times, traffic.bytes * times}});
  }
  return rows_of_table;
}

}  // namespace tessera::train::planning
