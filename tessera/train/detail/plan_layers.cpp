// Predicts the collectives of the layers over tp and cp, by dry runs of small models in a fake world.
#include "tessera/comm/detail/fake_world.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/models/loss.h"
#include "tessera/nn/checkpoint_wrapper.h"
#include "tessera/nn/deferred_init.h"
#include "tessera/optim/detail/local_tensors.h"
#include "tessera/pipelining/detail/stage_messages.h"
#include "tessera/tensor_parallel/loss_parallel.h"
#include "tessera/tensor_parallel/parallelize_module.h"
#include "tessera/train/detail/parallel_model.h"
#include "tessera/train/detail/plan_traffic.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <optional>

namespace tessera::train::planning {
namespace {

using TrafficByKind = std::map<std::pair<std::string, std::string>, Traffic>;  // key: "tp", "all_reduce in forward"

class TrafficByKindCount final : private comm::Observer {
 public:
  TrafficByKindCount() : scope_(this) {}
  void set_phase(std::string name) { phase_ = std::move(name); }
  const TrafficByKind& seen() const { return seen_; }

 private:
  void on_post(const comm::Record& record) override {
    if (!record.counted()) return;
    auto& traffic = seen_[{record.group, std::string(record.name()) + phase_}];
    traffic.collectives++;
    traffic.bytes += record.bytes;
  }
  std::string phase_;
  TrafficByKind seen_;
  comm::ObserverScope scope_;
};

int64_t embedding_dim(const models::GPT2Config& c) { return c.n_embd; }
int64_t embedding_dim(const models::LlamaConfig& c) { return c.dim; }

struct BatchShape {
  int64_t rows, length;
  int64_t tokens() const { return rows * length; }
};

// Allocates the parameters without initializing them: the results are not used. Unwritten pages cost no memory.
void allocate_parameters(torch::nn::Module& root) {
  const at::NoGradGuard no_grad;
  for (auto& buffer : root.buffers()) buffer.set_data(at::zeros(buffer.sizes(), buffer.scalar_type()));
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

// The ranks that take part in a dry run.
struct LayerRanks {
  int64_t cp, tp;
};

// The input of a stage without the embedding, as the stage before sends it.
at::Tensor activations(const TrainConfig& config, const DeviceMesh& mesh, at::IntArrayRef tokens) {
  const auto model = model_config(config.model);
  const int64_t dim = std::visit([](const auto& m) { return embedding_dim(m); }, model);
  const auto& precision = config.training.precision;
  const auto dtype = precision == "fp32" ? at::kFloat : precision == "bf16" ? at::kBFloat16 : at::kHalf;
  const int64_t tp = mesh.size("tp"), length = tokens[1];
  if (!config.parallel.sequence_parallel || tp == 1) return at::zeros({tokens[0], length, dim}, dtype).requires_grad_();
  const auto local = at::zeros({tokens[0], (length + tp - 1) / tp, dim}, dtype);
  return DTensor::from_local(local, mesh["tp"], {Shard(1)},
                             {.shape = std::vector<int64_t>{tokens[0], length, dim},
                              .stride = std::vector<int64_t>{length * dim, dim, 1}})
      .requires_grad_();
}

TrafficByKind run_stage(LanguageModel& model, const TrainConfig& config, const DeviceMesh& mesh, const PlanStage& stage,
                        const BatchShape& shape) {
  auto& root = module_of(model);
  root.zero_grad();
  auto layers = std::visit([](const auto& holder) { return models::pipeline_layers(holder); }, model);
  if (!stage.head) layers.pop_back();
  if (!stage.embedding) layers.erase(layers.begin());
  if (stage.blocks == 0) std::erase_if(layers, [](const auto& layer) { return block_of(layer.name + ".") >= 0; });
  TrafficByKindCount count;
  const LossParallel loss_parallel;
  std::optional<ContextParallel> context;
  if (mesh.size("cp") > 1) context.emplace(mesh["cp"], context_options(config.parallel));
  auto tokens = at::zeros({shape.rows, shape.length}, at::kLong);
  if (context) tokens = context->shard(tokens, 1);
  count.set_phase(" in forward");
  auto x = stage.embedding ? tokens : activations(config, mesh, tokens.sizes());
  for (const auto& layer : layers) x = layer.forward(x);
  if (stage.head) {
    x = models::loss_sum(x.to(at::kFloat), tokens);
    if (is_dtensor(x)) x = DTensor(x).full_tensor();
  }
  count.set_phase(" in backward");
  x.backward(at::zeros_like(x));
  count.set_phase(" of gradients");
  optim::detail::reduce_partial_gradients(root.parameters());
  return count.seen();
}

// Runs one step per batch shape. The data-parallel axes are not needed.
std::vector<TrafficByKind> run_on(const TrainConfig& config, const LayerRanks& ranks, const PlanStage& stage,
                                  const std::vector<BatchShape>& shapes) {
  const FakeWorld world(ranks.cp * ranks.tp);
  const auto mesh = init_device_mesh("cpu", {ranks.cp, ranks.tp}, {"cp", "tp"});
  auto model = deferred_init(
      [&] { return make_language_model(with_blocks(model_config(config.model), std::max<int64_t>(stage.blocks, 1))); });
  auto& root = module_of(model);
  if (const auto& precision = config.training.precision; precision != "fp32")
    deferred_init([&] { root.to(precision == "bf16" ? at::kBFloat16 : at::kHalf); });
  if (ranks.tp > 1) parallelize_module(root, mesh["tp"], tensor_parallel_plan(config), {.src_data_rank = std::nullopt});
  if (config.training.activation_checkpoint)
    for (const auto& block : blocks_of(model)) checkpoint_wrapper(*block);
  allocate_parameters(root);
  std::vector<TrafficByKind> seen;
  for (const auto& shape : shapes) seen.push_back(run_stage(model, config, mesh, stage, shape));
  return seen;
}

// Linear extrapolation: the value at `at` of the line through (x1, y1) and (x2, y2).
int64_t extrapolate(int64_t x1, int64_t y1, int64_t x2, int64_t y2, int64_t at) {
  return y1 + (y2 - y1) / (x2 - x1) * (at - x1);
}
TrafficByKind extrapolate(int64_t x1, const TrafficByKind& y1, int64_t x2, const TrafficByKind& y2, int64_t at) {
  TrafficByKind result;
  const auto value = [](const TrafficByKind& of, const TrafficByKind::key_type& kind) {
    const auto found = of.find(kind);
    return found == of.end() ? Traffic() : found->second;
  };
  for (const auto& [kind, unused] : y2) {
    const auto a = value(y1, kind), b = value(y2, kind);
    result[kind] = {extrapolate(x1, a.collectives, x2, b.collectives, at), extrapolate(x1, a.bytes, x2, b.bytes, at)};
  }
  return result;
}

TrafficByKind run_with_tokens(const TrainConfig& config, const LayerRanks& ranks, const PlanStage& stage, int64_t rows,
                              int64_t length) {
  // Short sequences keep their length, so that uneven shards over tp are as in the real run. Long ones become a short
  // length that is divisible by tp, and by cp in two parts per rank.
  constexpr int64_t kShort = 64;
  const int64_t parts = ranks.cp > 1 ? 2 * ranks.cp : 1, unit = parts * ranks.tp;
  const bool is_short = length <= std::max(kShort, 2 * unit);
  const BatchShape one{1, is_short ? length : unit}, two{is_short ? 2 : 1, is_short ? length : 2 * unit};
  const int64_t local = length / ranks.cp, padded = (local + ranks.tp - 1) / ranks.tp * ranks.tp;
  const int64_t tokens = rows * (is_short ? length : padded * ranks.cp);
  const auto seen = run_on(config, ranks, stage, {one, two});
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
TrafficByKind run_with_vocab(const TrainConfig& config, const LayerRanks& ranks, const PlanStage& stage, int64_t rows,
                             int64_t length) {
  const auto model = model_config(config.model);
  const int64_t vocab_size = std::visit([](const auto&m) { return m.vocab_size; }, model), tp = ranks.tp;
  const int64_t small = 8 * tp + vocab_size % tp, larger = small + 8 * tp;
  const auto with = [&](const TrainConfig& c) { return run_with_tokens(c, ranks, stage, rows, length); };
  if (vocab_size <= larger || !config.parallel.tp_plan.empty()) return with(config);
  return extrapolate(small, with(with_vocab_size(config, small, tp)), larger, with(with_vocab_size(config, larger, tp)),
                     vocab_size);
}

TrafficByKind run_with_blocks(const TrainConfig& config, const LayerRanks& ranks, PlanStage stage, int64_t rows,
                              int64_t length) {
  const auto with = [&](int64_t blocks) {
    stage.blocks = blocks;
    return run_with_vocab(config, ranks, stage, rows, length);
  };
  const int64_t blocks = stage.blocks;
  // A custom plan may treat each block differently.
  if (blocks <= 2 || !config.parallel.tp_plan.empty()) return with(blocks);
  const auto one = with(1);
  return extrapolate(1, one, 2, with(2), blocks);
}

int64_t rows_per_microbatch(const TrainConfig& config, const MeshShape& mesh, const PlanStages& stages) {
  return config.training.batch / (extent(mesh, "dp") * extent(mesh, "fsdp")) / stages.microbatches;
}

int64_t element_bytes(const TrainConfig& config) { return config.training.precision == "fp32" ? 4 : 2; }

}  // namespace

int64_t tokens_per_microbatch(const TrainConfig& config, const MeshShape& mesh, const PlanStages& stages) {
  return rows_per_microbatch(config, mesh, stages) * sequence_length(config) / extent(mesh, "cp");
}

std::vector<PlannedTraffic> layer_traffic(const TrainConfig& config, const MeshShape& mesh, const PlanStages& stages) {
  const LayerRanks ranks{extent(mesh, "cp"), extent(mesh, "tp")};
  if (ranks.tp == 1 && ranks.cp == 1) return {};
  const int64_t rows = rows_per_microbatch(config, mesh, stages), length = sequence_length(config);
  TrafficByKind total;
  for (const auto& stage : stages.stages)
    for (const auto& [kind, traffic] : run_with_blocks(config, ranks, stage, rows, length)) {
      const int64_t times = kind.second.ends_with(" of gradients") ? 1 : stages.microbatches;
      total[kind].collectives += traffic.collectives * times;
      total[kind].bytes += traffic.bytes * times;
    }
  std::vector<PlannedTraffic> planned;
  for (const auto& [kind, traffic] : total) planned.push_back({kind.first, kind.second, traffic});
  return planned;
}

std::vector<PlannedTraffic> expert_traffic(const TrainConfig& config, const MeshShape& mesh, const PlanStages& stages) {
  if (expert_ranks(config.parallel) == 1) return {};
  const auto model = model_config(config.model);
  const auto& llama = std::get<models::LlamaConfig>(model);
  int64_t layers = 0;
  for (const auto& stage : stages.stages) layers += stage.blocks;
  const int64_t forwards = config.training.activation_checkpoint ? 2 : 1, times = layers * stages.microbatches;
  const int64_t rows = tokens_per_microbatch(config, mesh, stages) * llama.moe.top_k;
  const int64_t bytes = rows * llama.dim * element_bytes(config), counts = llama.moe.n_experts * 8;
  return {{"ep", "all_to_all of tokens", {times * (2 * forwards + 2), times * (2 * forwards + 2) * bytes}, true},
          {"ep", "all_to_all of numbers of tokens", {times * forwards, times * forwards * counts}}};
}

std::vector<PlannedTraffic> stage_traffic(const TrainConfig& config, const MeshShape& mesh, const PlanStages& stages) {
  const auto& rank_of = stages.stage_ranks;
  if (rank_of.empty()) return {};
  const auto model = model_config(config.model);
  const int64_t dim = std::visit([](const auto& m) { return embedding_dim(m); }, model);
  const int64_t length = sequence_length(config) / extent(mesh, "cp"), tp = extent(mesh, "tp");
  const int64_t local = config.parallel.sequence_parallel ? (length + tp - 1) / tp : length;
  const int64_t bytes = rows_per_microbatch(config, mesh, stages) * local * dim * element_bytes(config);
  int64_t messages = 0;
  for (const auto& stage : stages.stages) {
    const auto i = static_cast<size_t>(stage.index);
    if (i + 1 < rank_of.size() && rank_of[i + 1] != rank_of[i]) messages += stages.microbatches;
    if (i > 0 && rank_of[i - 1] != rank_of[i]) messages += stages.microbatches;
  }
  std::vector<PlannedTraffic> planned{{"pp",
                                       "send of activations and their gradients",
                                       {2 * messages, messages * (bytes + pipelining::message_header_bytes())}}};
  if (stages.shared_bytes > 0) planned.push_back({"pp", "send of shared gradients", {1, stages.shared_bytes}});
  return planned;
}

}  // namespace tessera::train::planning
