// What data parallelism sends: buckets of gradients, units of parameters.
#include "tessera/comm/detail/fake_world.h"
#include "tessera/data_parallel/detail/buckets.h"
#include "tessera/data_parallel/fsdp/detail/engine/shard_layout.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/models/loss.h"
#include "tessera/nn/deferred_init.h"
#include "tessera/nn/grad_hooks.h"
#include "tessera/train/detail/network.h"
#include "tessera/train/detail/plan_traffic.h"

#include <ATen/ops/zeros.h>

#include <algorithm>

namespace tessera::train::planning {
namespace {

using data_parallel::fsdp::ShardLayout;

constexpr int64_t kFloat = 4;  // bytes of a parameter, and of a gradient that is reduced

models::GPT2Config tiny(models::GPT2Config config) {
  config.n_head = 1, config.n_embd = 2, config.vocab_size = 2, config.max_seq_len = 2;
  return config;
}
models::LlamaConfig tiny(models::LlamaConfig config) {
  config.n_heads = config.n_kv_heads = 1;
  config.dim = config.ffn_dim = config.vocab_size = config.max_seq_len = 2;
  return config;
}

std::string in_block(const std::string& name, int64_t block) {  // "h.1.x" -> "h.7.x"
  const auto first = name.find('.'), second = name.find('.', first + 1);
  return name.substr(0, first + 1) + std::to_string(block) + name.substr(second);
}

// Names of parameters as their gradients come. It depends on what the model does and not on its sizes, and all blocks
// but the first do the same: so a tiny one with two is run.
std::vector<std::string> order_of_gradients(const models::Config& config) {
  const int64_t blocks = blocks_in(config);
  const FakeWorld world(1);
  auto network = deferred_init([&] {
    return make_network(std::visit([](const auto& c) -> models::Config { return tiny(c); },
                                   with_blocks(config, std::min<int64_t>(blocks, 2))));
  });
  auto& root = module_of(network);
  materialize(root);
  std::vector<std::string> came, second_block, order;
  for (const auto& item : root.named_parameters())
    register_post_accumulate_grad_hook(item.value(),
                                       [&came, name = item.key()](const at::Tensor&) { came.push_back(name); });
  const auto tokens = at::zeros({1, 2}, at::kLong);
  models::loss_sum(logits_of(network, tokens), tokens).backward();
  for (const auto& name : came)
    if (block_of(name) == 1) second_block.push_back(name);
  for (const auto& name : came) {
    if (block_of(name) != 1) order.push_back(name);
    if (second_block.empty() || name != second_block[0]) continue;
    for (int64_t block = blocks - 1; block >= 1; block--)
      for (const auto& each : second_block) order.push_back(in_block(each, block));
  }
  return order;
}

int64_t numel_of(const std::vector<int64_t>& sizes) {
  int64_t n = 1;
  for (const auto size : sizes) n *= size;
  return n;
}

struct Unit {
  int64_t block;  // -1: the root
  ShardLayout layout;
};

// As Layout makes them: each block, and then what is left.
std::vector<Unit> units_of(const MeshShape& mesh, const Parameters& parameters) {
  std::map<int64_t, std::vector<data_parallel::fsdp::Extent>> by_block;
  for (const auto& p : parameters) by_block[block_of(p.name)].push_back({p.over_tp, 0});
  std::vector<Unit> units;
  for (auto& [block, extents] : by_block)
    units.push_back({block, ShardLayout::per_parameter(std::move(extents), extent(mesh, "fsdp"))});
  return units;
}

bool has_axis(const MeshShape& mesh, const std::string& axis) {
  return std::find(mesh.names.begin(), mesh.names.end(), axis) != mesh.names.end();
}

int64_t bytes_computed_with(const TrainConfig& config) { return config.training.precision == "fp32" ? kFloat : 2; }

}  // namespace

std::vector<PlannedTraffic> gradients_over_dp(const TrainConfig& config, const Parameters& parameters) {
  std::vector<data_parallel::BucketItem> items;
  std::map<std::string, size_t> index;
  for (const auto& p : parameters) {
    index[p.name] = items.size();
    items.push_back({numel_of(p.over_tp) * kFloat});
  }
  std::vector<size_t> order;
  for (const auto& name : order_of_gradients(model_config(config.model))) order.push_back(index.at(name));
  PlannedTraffic row{"dp", "all_reduce of gradients, in buckets", {}};
  for (const auto& bucket : data_parallel::fill_buckets(items, order)) {
    row.traffic.collectives++;
    for (const auto i : bucket) row.traffic.bytes += items[i].bytes;
  }
  return {row};
}

std::vector<PlannedTraffic> units_over_fsdp(const TrainConfig& config, const MeshShape& mesh,
                                            const Parameters& parameters) {
  const int64_t shards = extent(mesh, "fsdp"), replicas = extent(mesh, "dp"), parts = config.training.accumulate;
  PlannedTraffic gathers{"fsdp", "all_gather of parameters", {}}, scatters{"fsdp", "reduce_scatter of gradients", {}},
      reduces{"dp", "all_reduce of pieces of gradients", {}};
  for (const auto& [block, layout] : units_of(mesh, parameters)) {
    const int64_t times = (block < 0 ? 1 : 2) * parts;  // blocks for forward and for backward, the root once for both
    gathers.traffic.collectives += times;
    gathers.traffic.bytes += times * layout.shard_numel() * shards * bytes_computed_with(config);
    scatters.traffic.collectives++, scatters.traffic.bytes += layout.shard_numel() * shards * kFloat;
    reduces.traffic.collectives++, reduces.traffic.bytes += layout.shard_numel() * kFloat;
  }
  std::vector<PlannedTraffic> rows;
  if (shards > 1) rows = {gathers, scatters};
  if (replicas > 1) rows.push_back(reduces);
  return rows;
}

std::vector<PlannedTraffic> numbers_of_gradients(const TrainConfig& config, const Parameters& parameters) {
  std::vector<std::pair<DeviceMesh, std::vector<bool>>> shares;  // pieces that are missing the same ranks' part
  for (const auto& p : parameters) {
    if (!p.spec) continue;
    std::vector<bool> cut;
    for (const auto& placement : p.spec->placements) cut.push_back(placement.is_sharded());
    const std::pair share(p.spec->mesh, cut);
    const bool missing = std::find(cut.begin(), cut.end(), true) != cut.end();
    if (missing && std::find(shares.begin(), shares.end(), share) == shares.end()) shares.push_back(share);
  }
  std::vector<DeviceMesh> meshes;
  for (const auto& [mesh, cut] : shares)
    if (std::find(meshes.begin(), meshes.end(), mesh) == meshes.end()) meshes.push_back(mesh);

  // Which axes are best summed over together is the planner's affair: one number is sent to nobody, as clip_grad_norm_
  // and GradScaler would.
  const auto send = [](const DeviceMesh& mesh, const Placements& terms, c10::IntArrayRef sizes) {
    const auto spec = intern(mesh, terms, sizes, tessera::contiguous_strides(sizes), at::kFloat, at::kCPU);
    DTensor(tessera::detail::wrap(at::zeros(sizes, at::kFloat), spec))
        .redistribute(Placements(terms.size(), Replicate()))
        .to_local();
  };
  std::vector<PlannedTraffic> rows;
  {
    const TrafficCount count;
    for (const auto& [mesh, cut] : shares) {
      Placements terms;
      for (const bool is_sharded : cut) terms.push_back(is_sharded ? NormPartial(2) : Replicate());
      send(mesh, terms, {});
    }
    for (const auto& [axis, traffic] : count.by_axis())
      rows.push_back({axis, "all_reduce of the gradients' norm", traffic});
  }
  if (config.training.precision == "fp16") {
    const TrafficCount count;
    for (const auto& mesh : meshes)
      send(mesh, Placements(static_cast<size_t>(mesh.ndim()), Partial(ReduceOp::Max)), {1});
    for (const auto& [axis, traffic] : count.by_axis())
      rows.push_back({axis, "all_reduce of whether all are finite", traffic});
  }
  return rows;
}

int64_t gathered_bytes(const TrainConfig& config, const MeshShape& mesh, const Parameters& parameters) {
  const int64_t each = bytes_computed_with(config);
  if (!has_axis(mesh, "fsdp") || (extent(mesh, "fsdp") == 1 && each == kFloat)) return 0;
  int64_t root = 0, largest = 0;
  for (const auto& [block, layout] : units_of(mesh, parameters)) {
    const int64_t bytes = (layout.gathered_numel() + layout.landing_numel()) * each;
    block < 0 ? root += bytes : largest = std::max(largest, bytes);
  }
  return root + 2 * largest;  // one that computes, and one that is gathered ahead
}

}  // namespace tessera::train::planning
