#include "tessera/train/plan.h"

#include "tessera/base/error.h"
#include "tessera/comm/detail/fake_world.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/placement/detail/shard.h"
#include "tessera/train/detail/device.h"
#include "tessera/train/detail/parallel_model.h"
#include "tessera/train/detail/plan_traffic.h"

#include <algorithm>
#include <charconv>
#include <numeric>

namespace tessera::train {

namespace planning {

int64_t block_of(const std::string& name) {
  for (const std::string_view list : {"h.", "layers."}) {
    if (!name.starts_with(list)) continue;
    int64_t block = -1;
    std::from_chars(name.data() + list.size(), name.data() + name.size(), block);
    return block;
  }
  return -1;
}

int64_t blocks_in(const models::Config& config) {
  if (const auto* gpt = std::get_if<models::GPT2Config>(&config)) return gpt->n_layer;
  return std::get<models::LlamaConfig>(config).n_layers;
}

models::Config with_blocks(models::Config config, int64_t blocks) {
  if (auto* gpt = std::get_if<models::GPT2Config>(&config))
    gpt->n_layer = blocks;
  else
    std::get<models::LlamaConfig>(config).n_layers = blocks;
  return config;
}

}  // namespace planning

namespace {

using planning::PlanParameters;

std::string placements_text(const TensorSpec& spec) {
  std::string text;
  for (size_t i = 0; i < spec.placements.size(); i++)
    text += c10::str(text.empty() ? "" : ", ", spec.mesh.names()[i], " ", spec.placements[i]);
  return text;
}

int64_t fp32_bytes(c10::IntArrayRef sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), int64_t{4}, std::multiplies<>());
}

// Parameter bytes of every rank. Parameters with equal specs have equal sizes, so each spec is computed once per rank.
std::vector<int64_t> parameter_bytes_of_ranks(const MeshShape& mesh, int64_t ranks, const PlanParameters& parameters) {
  std::map<SpecRef, int64_t> count_of_spec;
  int64_t plain = 0;
  for (const auto& p : parameters) {
    if (p.spec)
      count_of_spec[p.spec]++;
    else
      plain += fp32_bytes(p.compute_sizes);
  }
  std::vector<int64_t> bytes;
  for (int64_t rank = 0; rank < ranks; rank++) {
    std::map<std::string, int64_t> coordinate_on;  // by mesh axis
    int64_t rest = rank;
    for (size_t axis = mesh.shape.size(); axis-- > 0; rest /= mesh.shape[axis])
      coordinate_on[mesh.names[axis]] = rest % mesh.shape[axis];
    int64_t local_bytes = plain;
    for (const auto& [spec, count] : count_of_spec) {
      std::vector<int64_t> coordinate;
      for (const auto& name : spec->mesh.names()) coordinate.push_back(coordinate_on[name]);
      local_bytes += count * fp32_bytes(local_sizes(spec->placements, spec->mesh.shape(), coordinate, spec->sizes));
    }
    bytes.push_back(local_bytes);
  }
  return bytes;
}

// Elements per token that autograd saves in a block: inputs of norms, matrix products and activation functions.
struct SavedActivations {
  int64_t replicated;  // over tp, unless sequence_parallel shards them
  int64_t sharded;     // over tp
};
SavedActivations saved_in_block(const models::Config& config) {
  if (const auto* gpt = std::get_if<models::GPT2Config>(&config)) return {4 * gpt->n_embd, 13 * gpt->n_embd};
  const auto& llama = std::get<models::LlamaConfig>(config);
  const int64_t keys = llama.n_kv_heads * llama.head_dim();
  return {4 * llama.dim, 4 * llama.dim + 3 * keys + 4 * llama.ffn_dim};
}

int64_t activation_bytes(const TrainConfig& config, const MeshShape& mesh) {
  const auto model = model_config(config.model);
  const int64_t tp = extent(mesh, "tp"), data_ranks = extent(mesh, "dp") * extent(mesh, "fsdp");
  const int64_t tokens = config.training.batch / data_ranks / config.training.accumulate * sequence_length(config);
  const auto [replicated, sharded] = saved_in_block(model);
  const int64_t dim = replicated / 4, blocks = planning::blocks_in(model);
  const int64_t vocab = std::visit([](const auto& m) { return m.vocab_size; }, model);
  const int64_t in_block = (config.parallel.sequence_parallel ? replicated / tp : replicated) + sharded / tp;
  const int64_t in_blocks = config.training.activation_checkpoint ? blocks * dim + in_block : blocks * in_block;
  const int64_t element_bytes = config.training.precision == "fp32" ? 4 : 2;
  const int64_t logits_bytes = 2 * 4 * (config.parallel.loss_parallel ? vocab / tp : vocab);  // and log-softmax
  const double bytes =
      static_cast<double>(tokens) * static_cast<double>((in_blocks + 2 * dim) * element_bytes + logits_bytes);
  return static_cast<int64_t>(std::min(bytes, 0x1p60));  // int64_t would overflow for impossible sizes
}

std::vector<PlannedMemory> memory_of(const TrainPlan& plan, const PlanParameters& parameters) {
  const int64_t bytes = plan.parameter_bytes[0];
  std::vector<PlannedMemory> memory{
      {"parameters", bytes}, {"gradients", bytes}, {"optimizer state (AdamW: two moments)", 2 * bytes}};
  if (const int64_t unsharded = planning::unsharded_bytes(plan.config, plan.mesh, parameters); unsharded > 0)
    memory.push_back({"unsharded parameters: root and two blocks", unsharded});
  memory.push_back({"activations", activation_bytes(plan.config, plan.mesh), true});
  return memory;
}

// Shapes and placements, from a model that is sharded but not materialized.
PlanParameters shard_parameters(TrainPlan& plan) {
  const auto compute_sizes = [&](const at::Tensor& p) {  // sharded over tp only
    std::vector<int64_t> sizes = p.sizes().vec();
    if (!is_dtensor(p)) return sizes;
    const auto& spec = DTensor(p).spec();
    Placements placements(spec.placements.begin(), spec.placements.end());
    for (size_t i = 0; i < placements.size(); i++)
      if (spec.mesh.names()[i] != "tp") placements[i] = Replicate();
    const auto local = local_sizes(placements, spec.mesh.shape(), *spec.mesh.get_coordinate(), sizes);
    return std::vector<int64_t>(local.begin(), local.end());
  };
  const auto mesh = init_device_mesh("cpu", plan.mesh.shape, plan.mesh.names);
  const ParallelModel model(plan.config, mesh, ParallelModel::Init::Deferred);
  PlanParameters parameters;
  for (const auto& item : model.module().named_parameters()) {
    const auto& p = item.value();
    auto spec = is_dtensor(p) ? tessera::detail::meta_of(p).spec : SpecRef();
    auto local = p.sizes().vec();
    if (spec) local.assign(spec->local_sizes.begin(), spec->local_sizes.end());
    plan.parameters.push_back(
        {item.key(), p.sizes().vec(), local, spec ? placements_text(*spec) : "", fp32_bytes(local)});
    parameters.push_back({item.key(), compute_sizes(p), std::move(spec)});
  }
  return parameters;
}

void append(std::vector<PlannedTraffic>& to, const std::vector<PlannedTraffic>& more) {
  to.insert(to.end(), more.begin(), more.end());
}

}  // namespace

int64_t TrainPlan::memory_bytes() const {
  int64_t bytes = 0;
  for (const auto& part : memory) bytes += part.bytes;
  return bytes;
}

std::map<std::string, Traffic> TrainPlan::traffic_by_axis() const {
  std::map<std::string, Traffic> by_axis;
  for (const auto& planned : traffic) {
    by_axis[planned.axis].collectives += planned.traffic.collectives;
    by_axis[planned.axis].bytes += planned.traffic.bytes;
  }
  return by_axis;
}

std::vector<std::string> config_errors(const TrainConfig& config, int64_t ranks) {
  std::vector<std::string> errors;
  const auto collect = [&](const TrainConfig& c) {
    try {
      check(c, ranks);
    } catch (const UsageError& error) {
      const std::string message = error.what_without_backtrace();
      if (std::find(errors.begin(), errors.end(), message) == errors.end()) errors.push_back(message);
    }
  };
  collect(config);
  // check() stops at the first problem. A batch that is divisible reveals the problems after a batch that is not.
  auto other = config;
  other.training.accumulate = 1;
  other.training.batch = ranks;
  collect(other);
  return errors;
}

TrainPlan plan_training(const TrainConfig& config, int64_t ranks) {
  TESSERA_CHECK(ranks >= 1, UsageError, "cannot plan for ", ranks, " ranks; use at least 1");
  check(config, ranks);
  TrainPlan plan;
  plan.config = config;
  plan.mesh = mesh_shape(config, ranks);
  plan.ranks = ranks;
  plan.device_memory = device_memory_bytes(at::Device(config.training.device));
  const auto has = [&](const char* axis) {
    return std::find(plan.mesh.names.begin(), plan.mesh.names.end(), axis) != plan.mesh.names.end();
  };
  PlanParameters parameters;
  {
    const FakeWorld world(ranks);
    parameters = shard_parameters(plan);
    plan.parameter_bytes = parameter_bytes_of_ranks(plan.mesh, ranks, parameters);
    plan.memory = memory_of(plan, parameters);
    plan.traffic = planning::grad_norm_traffic(config, parameters);
    for (auto& p : parameters) p.spec.reset();  // its mesh belongs to this world
  }
  if (has("fsdp"))
    append(plan.traffic, planning::fsdp_traffic(config, plan.mesh, parameters));
  else if (extent(plan.mesh, "dp") > 1)
    append(plan.traffic, planning::bucket_traffic(config, parameters));
  append(plan.traffic, planning::tensor_parallel_traffic(config, plan.mesh));
  std::stable_sort(plan.traffic.begin(), plan.traffic.end(),
                   [](const auto& a, const auto& b) { return a.axis < b.axis; });  // dp, fsdp, tp
  return plan;
}

}  // namespace tessera::train
