#include "tessera/train/plan.h"

#include "tessera/base/error.h"
#include "tessera/comm/detail/fake_world.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/pipelining/detail/lowering.h"
#include "tessera/pipelining/detail/simulate.h"
#include "tessera/placement/detail/shard.h"
#include "tessera/train/detail/device.h"
#include "tessera/train/detail/parallel_model.h"
#include "tessera/train/detail/pipeline_shape.h"
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
using planning::PlanStage;
using planning::PlanStages;

std::string placements_text(const TensorSpec& spec) {
  std::string text;
  for (size_t i = 0; i < spec.placements.size(); i++)
    text += c10::str(text.empty() ? "" : ", ", spec.mesh.names()[i], " ", spec.placements[i]);
  return text;
}

int64_t fp32_bytes(c10::IntArrayRef sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), int64_t{4}, std::multiplies<>());
}

// Parameter bytes of the ranks first to last - 1. Parameters with equal specs have equal sizes, so each spec is
// computed once per rank.
std::vector<int64_t> parameter_bytes_of_ranks(const MeshShape& mesh, int64_t first, int64_t last,
                                              const PlanParameters& parameters) {
  std::map<SpecRef, int64_t> count_of_spec;
  int64_t plain = 0;
  for (const auto& p : parameters) {
    if (p.spec)
      count_of_spec[p.spec]++;
    else
      plain += fp32_bytes(p.compute_sizes);
  }
  std::vector<int64_t> bytes;
  for (int64_t rank = first; rank < last; rank++) {
    std::map<std::string, int64_t> coordinate_on;  // by mesh axis; all coordinates of ep have equal shards
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
  int64_t dim;
  int64_t replicated;  // over tp, unless sequence_parallel shards them
  int64_t sharded;     // over tp
  int64_t experts;     // replicated over tp always
};
SavedActivations saved_in_block(const models::Config& config) {
  if (const auto* gpt = std::get_if<models::GPT2Config>(&config))
    return {gpt->n_embd, 4 * gpt->n_embd, 13 * gpt->n_embd, 0};
  const auto& llama = std::get<models::LlamaConfig>(config);
  const int64_t attention = 4 * llama.dim + 3 * llama.n_kv_heads * llama.head_dim(), ffn = 4 * llama.ffn_dim;
  if (llama.moe.n_experts == 0) return {llama.dim, 4 * llama.dim, attention + ffn, 0};
  return {llama.dim, 4 * llama.dim, attention,
          llama.moe.top_k * (2 * llama.dim + ffn) + llama.moe.n_shared_experts * ffn};
}

// Bytes of activations that a stage keeps per microbatch, and those of the block that is recomputed.
struct ActivationBytes {
  double kept, recomputed;
};
ActivationBytes activation_bytes(const TrainConfig& config, const MeshShape& mesh, const PlanStages& stages,
                                 const PlanStage& stage) {
  const auto model = model_config(config.model);
  const int64_t tp = extent(mesh, "tp");
  const auto tokens = static_cast<double>(planning::tokens_per_microbatch(config, mesh, stages));
  const auto [dim, replicated, sharded, experts] = saved_in_block(model);
  const int64_t vocab = std::visit([](const auto& m) { return m.vocab_size; }, model);
  const int64_t in_block = (config.parallel.sequence_parallel ? replicated / tp : replicated) + sharded / tp + experts;
  const bool recomputes = config.training.activation_checkpoint;
  const int64_t elements =
      stage.blocks * (recomputes ? dim : in_block) + (stage.embedding ? dim : 0) + (stage.head ? dim : 0);
  const int64_t element_bytes = config.training.precision == "fp32" ? 4 : 2;
  const int64_t logits_bytes = stage.head ? 2 * 4 * (config.parallel.loss_parallel ? vocab / tp : vocab) : 0;
  return {tokens * static_cast<double>(elements * element_bytes + logits_bytes),
          recomputes ? tokens * static_cast<double>(in_block * element_bytes) : 0};
}

std::vector<PlannedMemory> memory_of(const TrainPlan& plan, int64_t bytes, double activations,
                                     const PlanParameters& parameters, const PlanStages& stages) {
  std::vector<PlannedMemory> memory{
      {"parameters", bytes}, {"gradients", bytes}, {"optimizer state (AdamW: two moments)", 2 * bytes}};
  if (const int64_t unsharded = planning::unsharded_bytes(plan.config, plan.mesh, parameters, stages); unsharded > 0)
    memory.push_back({"unsharded parameters: root and two blocks", unsharded});
  // int64_t would overflow for impossible sizes.
  memory.push_back({"activations", static_cast<int64_t>(std::min(activations, 0x1p60)), true});
  return memory;
}

int64_t sum_of(const std::vector<PlannedMemory>& memory) {
  int64_t bytes = 0;
  for (const auto& part : memory) bytes += part.bytes;
  return bytes;
}

// Shapes, placements and stages of the current rank, from a model that is sharded but not materialized.
std::pair<PlanParameters, PlanStages> shard_parameters(TrainPlan& plan) {
  const auto compute_sizes = [&](const at::Tensor& p) {  // sharded over tp and ep only
    std::vector<int64_t> sizes = p.sizes().vec();
    if (!is_dtensor(p)) return sizes;
    const auto& spec = DTensor(p).spec();
    Placements placements(spec.placements.begin(), spec.placements.end());
    for (size_t i = 0; i < placements.size(); i++)
      if (spec.mesh.names()[i] != "tp" && spec.mesh.names()[i] != "ep") placements[i] = Replicate();
    const auto local = local_sizes(placements, spec.mesh.shape(), *spec.mesh.get_coordinate(), sizes);
    return std::vector<int64_t>(local.begin(), local.end());
  };
  const auto mesh = init_device_mesh("cpu", plan.mesh.shape, plan.mesh.names);
  const ParallelModel model(plan.config, mesh, ParallelModel::Init::Deferred);
  PlanParameters parameters;
  std::map<std::string, size_t> index;
  for (const auto& [name, p] : model.parameters()) {
    auto spec = is_dtensor(p) ? tessera::detail::meta_of(p).spec : SpecRef();
    auto local = p.sizes().vec();
    if (spec) local.assign(spec->local_sizes.begin(), spec->local_sizes.end());
    const bool known =
        std::ranges::any_of(plan.parameters, [&, &name = name](const auto& other) { return other.name == name; });
    if (!known)  // another stage may have a copy
      plan.parameters.push_back({name, p.sizes().vec(), local, spec ? placements_text(*spec) : "", fp32_bytes(local)});
    const bool is_expert = spec && spec->mesh.names()[0] == "ep";
    index[name] = parameters.size();
    parameters.push_back({name, compute_sizes(p), local, std::move(spec), is_expert});
  }
  PlanStages stages;
  if (!model.has_stages()) {
    PlanStage all;
    all.blocks = planning::blocks_in(model_config(plan.config.model));
    for (size_t i = 0; i < parameters.size(); i++) all.parameters.push_back(i);
    stages.stages.push_back(std::move(all));
    stages.microbatches = plan.config.training.accumulate;
    return {parameters, stages};
  }
  stages.microbatches = model.microbatches();
  for (size_t i = 0; i < model.stages().size(); i++) {
    const auto& stage = model.stages()[i];
    PlanStage planned{
        stage.stage_index(), stage.stage_index() == 0, stage.stage_index() + 1 == stage.num_stages(), 0, {}};
    for (const auto& layer : model.stage_layers()[i]) planned.blocks += planning::block_of(layer.name + ".") >= 0;
    for (const auto& name : stage.names)
      if (index.contains(name)) planned.parameters.push_back(index.at(name));  // no buffers
    stages.stages.push_back(std::move(planned));
  }
  const auto shape = pipeline_shape(plan.config, plan.mesh);
  stages.stage_ranks = pipelining::stage_ranks(plan.config.parallel.pipeline_schedule, shape);
  if (shape.ranks > 1 && stages.stage_ranks.front() != stages.stage_ranks.back())
    for (const auto& shared : model.stages().front().shared)
      for (const auto& [name, p] : model.parameters())
        if (p.is_same(shared.parameter)) stages.shared_bytes += fp32_bytes(parameters[index.at(name)].local_sizes);
  return {parameters, stages};
}

// Time of a microbatch: floating-point operations per token of the forward. Gradients of inputs and weights take as
// long each.
double forward_cost(const TrainConfig& config, const PlanStage& stage) {
  const auto model = model_config(config.model);
  const auto count = [&](int64_t blocks) {
    return static_cast<double>(models::parameter_count(planning::with_blocks(model, blocks)));
  };
  const int64_t dim = saved_in_block(model).dim;
  const double block = count(2) - count(1) + 2 * static_cast<double>(dim * sequence_length(config));
  const auto vocab = static_cast<double>(std::visit([](const auto& m) { return m.vocab_size; }, model));
  return static_cast<double>(stage.blocks) * block + (stage.head ? vocab * static_cast<double>(dim) : 0) +
         static_cast<double>(dim);  // a stage that only looks up embeddings
}

// What the planned ranks of pp have.
struct RankPlan {
  PlanParameters parameters;
  PlanStages stages;
};

pipelining::Simulation simulate_pipeline(const TrainPlan& plan, const std::vector<RankPlan>& ranks) {
  const auto shape = pipeline_shape(plan.config, plan.mesh);
  const auto& schedule = plan.config.parallel.pipeline_schedule;
  std::vector<pipelining::StageCost> costs(static_cast<size_t>(shape.stages()));
  for (const auto& rank : ranks)
    for (const auto& stage : rank.stages.stages) {
      const double cost = forward_cost(plan.config, stage);
      costs[static_cast<size_t>(stage.index)] = {cost, stage.embedding ? 0 : cost, cost, 0,
                                                 activation_bytes(plan.config, plan.mesh, rank.stages, stage).kept};
    }
  const auto table = pipelining::compute_schedule(schedule, shape);
  return pipelining::simulate(
      pipelining::lower_schedule(table, pipelining::stage_ranks(schedule, shape), shape.microbatches), costs);
}

// Memory of the rank that needs the most, and the pipeline.
void plan_memory(TrainPlan& plan, const std::vector<RankPlan>& planned) {
  const int64_t ranks_per_stage = plan.ranks / static_cast<int64_t>(planned.size());
  const auto shape = pipeline_shape(plan.config, plan.mesh);
  std::optional<pipelining::Simulation> simulation;
  if (planned.size() > 1) {
    simulation = simulate_pipeline(plan, planned);
    plan.pipeline = {pipelining::canonical_name(plan.config.parallel.pipeline_schedule),
                     shape.stages(),
                     shape.microbatches,
                     simulation->bubble(),
                     {}};
  }
  for (size_t p = 0; p < planned.size(); p++) {
    const auto& [parameters, stages] = planned[p];
    const int64_t rank = static_cast<int64_t>(p) * ranks_per_stage;
    double activations = 0, recomputed = 0;
    PlannedStages row;
    for (const auto& stage : stages.stages) {
      const auto bytes = activation_bytes(plan.config, plan.mesh, stages, stage);
      activations += bytes.kept;
      recomputed = std::max(recomputed, bytes.recomputed);
      row.stages.push_back(stage.index);
      row.blocks += stage.blocks;
    }
    if (simulation) activations = simulation->ranks[p].peak;
    auto memory =
        memory_of(plan, plan.parameter_bytes[static_cast<size_t>(rank)], activations + recomputed, parameters, stages);
    row.memory_bytes = sum_of(memory);
    if (p == 0 || row.memory_bytes > plan.memory_bytes()) {
      plan.memory_rank = rank;
      plan.memory = std::move(memory);
    }
    if (!simulation) continue;
    row.busy = simulation->ranks[p].busy / simulation->seconds;
    plan.pipeline->ranks.push_back(std::move(row));
  }
}

void append(std::vector<PlannedTraffic>& to, const std::vector<PlannedTraffic>& more) {
  to.insert(to.end(), more.begin(), more.end());
}

}  // namespace

int64_t TrainPlan::memory_bytes() const { return sum_of(memory); }

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
  other.training.batch = ranks * std::max<int64_t>(1, config.parallel.microbatches);
  collect(other);
  return errors;
}

TrainPlan plan_training(const TrainConfig& config, int64_t ranks) {
  TESSERA_CHECK(ranks >= 1, UsageError, "cannot plan for ", ranks, " ranks; use at least 1");
  check(config, ranks);
  TESSERA_CHECK(config.training.numerics == "default", UsageError,
                "a plan predicts the collectives and the memory of the default step; remove --numerics invariant");
  TrainPlan plan;
  plan.config = config;
  plan.mesh = mesh_shape(config, ranks);
  plan.ranks = ranks;
  plan.device_memory = device_memory_bytes(at::Device(config.training.device));
  const auto has = [&](const char* axis) {
    return std::find(plan.mesh.names.begin(), plan.mesh.names.end(), axis) != plan.mesh.names.end();
  };
  const int64_t pp = extent(plan.mesh, "pp"), ranks_per_stage = ranks / pp;  // pp is the first axis
  std::vector<RankPlan> planned;
  for (int64_t p = 0; p < pp; p++) {
    const FakeWorld world(ranks, p * ranks_per_stage);
    auto [parameters, stages] = shard_parameters(plan);
    const auto bytes = parameter_bytes_of_ranks(plan.mesh, p * ranks_per_stage, (p + 1) * ranks_per_stage, parameters);
    plan.parameter_bytes.insert(plan.parameter_bytes.end(), bytes.begin(), bytes.end());
    if (p == 0) plan.traffic = planning::grad_norm_traffic(config, plan.mesh, parameters);
    for (auto& parameter : parameters) parameter.spec.reset();  // its mesh belongs to this world
    planned.push_back({std::move(parameters), std::move(stages)});
  }
  plan_memory(plan, planned);
  const auto& [parameters, stages] = planned[0];
  const bool replicates = pp == 1 && expert_ranks(config.parallel) == 1 && !has("cp");
  if (has("fsdp"))
    append(plan.traffic, planning::fsdp_traffic(config, plan.mesh, parameters, stages));
  else if (extent(plan.mesh, "dp") > 1 && replicates)
    append(plan.traffic, planning::bucket_traffic(config, parameters));
  append(plan.traffic, planning::reduced_traffic(config, plan.mesh, parameters, stages));
  append(plan.traffic, planning::layer_traffic(config, plan.mesh, stages));
  append(plan.traffic, planning::expert_traffic(config, plan.mesh, stages));
  append(plan.traffic, planning::stage_traffic(config, plan.mesh, stages));
  std::stable_sort(plan.traffic.begin(), plan.traffic.end(),
                   [](const auto& a, const auto& b) { return a.axis < b.axis; });
  return plan;
}

}  // namespace tessera::train
