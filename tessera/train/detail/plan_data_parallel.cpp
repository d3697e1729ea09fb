// Predicts the collectives of data parallelism: gradient buckets, FSDP units, gradient norms.
#include "tessera/comm/detail/fake_world.h"
#include "tessera/data_parallel/detail/buckets.h"
#include "tessera/data_parallel/fsdp/detail/engine/shard_layout.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/models/loss.h"
#include "tessera/nn/deferred_init.h"
#include "tessera/nn/grad_hooks.h"
#include "tessera/train/detail/language_model.h"
#include "tessera/train/detail/plan_traffic.h"

#include <ATen/ops/zeros.h>

#include <algorithm>

namespace tessera::train::planning {
namespace {

using data_parallel::fsdp::ShardLayout;

constexpr int64_t kFloatBytes = 4;  // of a parameter and of a reduced gradient

models::GPT2Config tiny(models::GPT2Config config) {
  config.n_head = 1, config.n_embd = 2, config.vocab_size = 2, config.max_seq_len = 2;
  return config;
}
models::LlamaConfig tiny(models::LlamaConfig config) {
  config.n_heads = config.n_kv_heads = 1;  // the experts stay
  config.dim = config.ffn_dim = config.vocab_size = config.max_seq_len = 2;
  return config;
}

std::string rename_block(const std::string& name, int64_t block) {  // "h.1.x" -> "h.7.x"
  const auto first = name.find('.'), second = name.find('.', first + 1);
  return name.substr(0, first + 1) + std::to_string(block) + name.substr(second);
}

// Names of the parameters in the order in which backward produces their gradients. The order does not depend on the
// sizes, and all blocks but the first have the same order. So a tiny model with two blocks runs.
std::vector<std::string> gradient_order(const models::Config& config) {
  const int64_t blocks = blocks_in(config);
  const FakeWorld world(1);
  auto model = deferred_init([&] {
    return make_language_model(std::visit([](const auto& c) -> models::Config { return tiny(c); },
                                          with_blocks(config, std::min<int64_t>(blocks, 2))));
  });
  auto& root = module_of(model);
  materialize(root);
  std::vector<std::string> ready, second_block, order;
  for (const auto& item : root.named_parameters())
    register_post_accumulate_grad_hook(item.value(),
                                       [&ready, name = item.key()](const at::Tensor&) { ready.push_back(name); });
  const auto tokens = at::zeros({1, 2}, at::kLong);
  models::loss_sum(logits_of(model, tokens), tokens).backward();
  for (const auto& name : ready)
    if (block_of(name) == 1) second_block.push_back(name);
  for (const auto& name : ready) {
    if (block_of(name) != 1) order.push_back(name);
    if (second_block.empty() || name != second_block[0]) continue;
    for (int64_t block = blocks - 1; block >= 1; block--)
      for (const auto& each : second_block) order.push_back(rename_block(each, block));
  }
  return order;
}

int64_t numel_of(const std::vector<int64_t>& sizes) {
  int64_t n = 1;
  for (const auto size : sizes) n *= size;
  return n;
}

struct FsdpUnit {
  int64_t block;  // -1: the root of a stage
  ShardLayout layout;
};

// The units of ParallelModel: each block, and the root of each stage with the rest. Experts over ep are in none.
std::vector<FsdpUnit> units_of(const MeshShape& mesh, const PlanParameters& parameters, const PlanStages& stages) {
  std::vector<FsdpUnit> units;
  for (const auto& stage : stages.stages) {
    std::map<int64_t, std::vector<data_parallel::fsdp::ParamShape>> by_block;
    for (const size_t i : stage.parameters)
      if (!parameters[i].is_expert) by_block[block_of(parameters[i].name)].push_back({parameters[i].compute_sizes, 0});
    for (auto& [block, extents] : by_block)
      units.push_back({block, ShardLayout::per_parameter(std::move(extents), extent(mesh, "fsdp"))});
  }
  return units;
}

bool has_axis(const MeshShape& mesh, const std::string& axis) {
  return std::find(mesh.names.begin(), mesh.names.end(), axis) != mesh.names.end();
}

int64_t compute_bytes(const TrainConfig& config) { return config.training.precision == "fp32" ? kFloatBytes : 2; }

}  // namespace

std::vector<PlannedTraffic> bucket_traffic(const TrainConfig& config, const PlanParameters& parameters) {
  std::vector<data_parallel::BucketItem> items;
  std::map<std::string, size_t> index;
  for (const auto& p : parameters) {
    index[p.name] = items.size();
    items.push_back({numel_of(p.compute_sizes) * kFloatBytes});
  }
  std::vector<size_t> order;
  for (const auto& name : gradient_order(model_config(config.model))) order.push_back(index.at(name));
  PlannedTraffic total{"dp", "all_reduce of gradients, in buckets", {}};
  for (const auto& bucket : data_parallel::fill_buckets(items, order)) {
    total.traffic.collectives++;
    for (const auto i : bucket) total.traffic.bytes += items[i].bytes;
  }
  return {total};
}

std::vector<PlannedTraffic> reduced_traffic(const TrainConfig& config, const MeshShape& mesh,
                                            const PlanParameters& parameters, const PlanStages& stages) {
  const int64_t ep = expert_ranks(config.parallel);
  const int64_t copies = extent(mesh, "dp") * extent(mesh, "fsdp") * extent(mesh, "cp") / ep;
  const bool replicates = extent(mesh, "pp") == 1 && ep == 1 && !has_axis(mesh, "cp");
  std::vector<PlannedTraffic> planned;
  const auto add = [&](const char* axis, bool of_experts) {
    PlannedTraffic total{axis, of_experts ? "all_reduce of gradients of experts" : "all_reduce of gradients", {}};
    for (const auto& stage : stages.stages) {
      int64_t bytes = 0;
      for (const size_t i : stage.parameters)
        if (parameters[i].is_expert == of_experts) bytes += numel_of(parameters[i].local_sizes) * kFloatBytes;
      if (bytes == 0) continue;
      total.traffic.collectives++;
      total.traffic.bytes += bytes;
    }
    planned.push_back(total);
  };
  if (extent(mesh, "dp") > 1 && !has_axis(mesh, "fsdp") && !replicates) add("dp", false);
  if (extent(mesh, "cp") > 1) add("cp", false);
  if (ep > 1 && copies > 1) add("edp", true);
  return planned;
}

std::vector<PlannedTraffic> fsdp_traffic(const TrainConfig& config, const MeshShape& mesh,
                                         const PlanParameters& parameters, const PlanStages& stages) {
  const int64_t shards = extent(mesh, "fsdp"), replicas = extent(mesh, "dp"), microbatches = stages.microbatches;
  PlannedTraffic gathers{"fsdp", "all_gather of parameters", {}}, scatters{"fsdp", "reduce_scatter of gradients", {}},
      reduces{"dp", "all_reduce of sharded gradients", {}};
  gathers.estimate = !stages.stage_ranks.empty();  // the root of a stage is gathered once or twice per microbatch
  for (const auto& [block, layout] : units_of(mesh, parameters, stages)) {
    const int64_t times = (block < 0 ? 1 : 2) * microbatches;  // blocks in forward and in backward, the root once
    gathers.traffic.collectives += times;
    gathers.traffic.bytes += times * layout.shard_numel() * shards * compute_bytes(config);
    // An eager step also reduces one flag per parameter: whether the rank has a gradient of it.
    const int64_t flags = config.training.compile ? 0 : static_cast<int64_t>(layout.num_params());
    const int64_t shard_bytes = (layout.shard_numel() + flags) * kFloatBytes;
    scatters.traffic.collectives++, scatters.traffic.bytes += shard_bytes * shards;
    reduces.traffic.collectives++, reduces.traffic.bytes += shard_bytes;
  }
  std::vector<PlannedTraffic> traffic;
  if (shards > 1) traffic = {gathers, scatters};
  if (replicas > 1) traffic.push_back(reduces);
  return traffic;
}

std::vector<PlannedTraffic> grad_norm_traffic(const TrainConfig& config, const MeshShape& mesh,
                                              const PlanParameters& parameters) {
  std::vector<std::pair<DeviceMesh, std::vector<bool>>> kinds;  // parameters that are sharded over the same axes
  for (const auto& p : parameters) {
    if (!p.spec) continue;
    std::vector<bool> sharded;
    for (const auto& placement : p.spec->placements) sharded.push_back(placement.is_sharded());
    const std::pair kind(p.spec->mesh, sharded);
    const bool any_sharded = std::find(sharded.begin(), sharded.end(), true) != sharded.end();
    if (any_sharded && std::find(kinds.begin(), kinds.end(), kind) == kinds.end()) kinds.push_back(kind);
  }
  std::vector<DeviceMesh> meshes;
  for (const auto& [kind_mesh, sharded] : kinds)
    if (std::find(meshes.begin(), meshes.end(), kind_mesh) == meshes.end()) meshes.push_back(kind_mesh);

  // Runs the same redistribution as clip_grad_norm_() and GradScaler in the fake world, because the redistribution
  // planner decides which axes to reduce together.
  const auto reduce = [](const DeviceMesh& mesh, const Placements& partial, c10::IntArrayRef sizes) {
    const auto spec = intern(mesh, partial, sizes, tessera::contiguous_strides(sizes), at::kFloat, at::kCPU);
    DTensor(tessera::detail::wrap(at::zeros(sizes, at::kFloat), spec))
        .redistribute(Placements(partial.size(), Replicate()))
        .to_local();
  };
  std::vector<PlannedTraffic> planned;
  {
    const TrafficCount count;
    for (const auto& [kind_mesh, sharded] : kinds) {
      Placements partial;
      for (const bool is_sharded : sharded) partial.push_back(is_sharded ? NormPartial(2) : Replicate());
      reduce(kind_mesh, partial, {});
    }
    for (const auto& [axis, traffic] : count.by_axis())
      planned.push_back({axis, "all_reduce of the gradient norm", traffic});
  }
  if (config.training.precision == "fp16") {
    const TrafficCount count;
    for (const auto& each : meshes)
      reduce(each, Placements(static_cast<size_t>(each.ndim()), Partial(ReduceOp::Max)), {1});
    for (const auto& [axis, traffic] : count.by_axis())
      planned.push_back({axis, "all_reduce of the inf check (fp16)", traffic});
  }
  if (extent(mesh, "pp") > 1) {
    planned.push_back({"pp", "all_reduce of the gradient norm", {1, kFloatBytes}});
    if (config.training.precision == "fp16")
      planned.push_back({"pp", "all_reduce of the inf check (fp16)", {1, kFloatBytes}});
  }
  return planned;
}

int64_t unsharded_bytes(const TrainConfig& config, const MeshShape& mesh, const PlanParameters& parameters,
                        const PlanStages& stages) {
  const int64_t each = compute_bytes(config);
  if (!has_axis(mesh, "fsdp") || (extent(mesh, "fsdp") == 1 && each == kFloatBytes)) return 0;
  int64_t root = 0, largest = 0;
  for (const auto& [block, layout] : units_of(mesh, parameters, stages)) {
    const int64_t bytes = (layout.gathered_numel() + layout.staging_numel()) * each;
    block < 0 ? root += bytes : largest = std::max(largest, bytes);
  }
  return root + 2 * largest;  // the block that computes and the prefetched one
}

}  // namespace tessera::train::planning
