#include "tessera/train/plan.h"

#include "tessera/base/error.h"
#include "tessera/comm/detail/fake_world.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/placement/detail/shard.h"
#include "tessera/train/detail/model_layout.h"
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

using planning::Parameters;

std::string placements_text(const TensorSpec& spec) {
  std::string text;
  for (size_t i = 0; i < spec.placements.size(); i++)
    text += c10::str(text.empty() ? "" : ", ", spec.mesh.names()[i], " ", spec.placements[i]);
  return text;
}

int64_t bytes_of(c10::IntArrayRef sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), int64_t{4}, std::multiplies<>());
}

// Every rank's parameters. Parameters of one spec are as large, so there are few to look at however many ranks.
std::vector<int64_t> bytes_of_ranks(const MeshShape& mesh, int64_t ranks, const Parameters& parameters) {
  std::map<SpecRef, int64_t> alike;
  int64_t plain = 0;
  for (const auto& p : parameters) {
    if (p.spec)
      alike[p.spec]++;
    else
      plain += bytes_of(p.over_tp);
  }
  std::vector<int64_t> bytes;
  for (int64_t rank = 0; rank < ranks; rank++) {
    std::map<std::string, int64_t> place;  // on each axis of the mesh
    int64_t rest = rank;
    for (size_t axis = mesh.shape.size(); axis-- > 0; rest /= mesh.shape[axis])
      place[mesh.names[axis]] = rest % mesh.shape[axis];
    int64_t held = plain;
    for (const auto& [spec, count] : alike) {
      std::vector<int64_t> coordinate;
      for (const auto& name : spec->mesh.names()) coordinate.push_back(place[name]);
      held += count * bytes_of(local_sizes(spec->placements, spec->mesh.shape(), coordinate, spec->sizes));
    }
    bytes.push_back(held);
  }
  return bytes;
}

// What autograd keeps of a token in a block, in elements: inputs of norms, of products, of the nonlinearity. The first
// is whole on every rank unless it is cut along the sequence; the second is cut over tp.
struct Kept {
  int64_t whole, cut;
};
Kept kept_in_block(const models::Config& config) {
  if (const auto* gpt = std::get_if<models::GPT2Config>(&config)) return {4 * gpt->n_embd, 13 * gpt->n_embd};
  const auto& llama = std::get<models::LlamaConfig>(config);
  const int64_t keys = llama.n_kv_heads * llama.head_dim();
  return {4 * llama.dim, 4 * llama.dim + 3 * keys + 4 * llama.ffn_dim};
}

int64_t activation_bytes(const TrainConfig& config, const MeshShape& mesh) {
  const auto model = model_config(config.model);
  const int64_t tp = extent(mesh, "tp"), data_ranks = extent(mesh, "dp") * extent(mesh, "fsdp");
  const int64_t tokens = config.training.batch / data_ranks / config.training.accumulate * sequence_length(config);
  const auto [whole, cut] = kept_in_block(model);
  const int64_t width = whole / 4, blocks = planning::blocks_in(model);
  const int64_t vocab = std::visit([](const auto& m) { return m.vocab_size; }, model);
  const int64_t in_block = (config.parallel.sequence_parallel ? whole / tp : whole) + cut / tp;
  const int64_t in_blocks = config.training.activation_checkpoint ? blocks * width + in_block : blocks * in_block;
  const int64_t each = config.training.precision == "fp32" ? 4 : 2;
  const int64_t of_logits = 2 * 4 * (config.parallel.loss_parallel ? vocab / tp : vocab);  // and their logarithms
  return tokens * ((in_blocks + 2 * width) * each + of_logits);
}

std::vector<PlannedMemory> memory_of(const TrainPlan& plan, const Parameters& parameters) {
  const int64_t held = plan.parameter_bytes[0];
  std::vector<PlannedMemory> rows{
      {"parameters", held}, {"gradients", held}, {"optimizer state (AdamW: two moments)", 2 * held}};
  if (const int64_t gathered = planning::gathered_bytes(plan.config, plan.mesh, parameters); gathered > 0)
    rows.push_back({"gathered: the root, and two blocks", gathered});
  rows.push_back({"activations", activation_bytes(plan.config, plan.mesh), true});
  return rows;
}

// Shapes and placements, by laying the network out without filling it.
Parameters lay_out(TrainPlan& plan) {
  const auto tp_alone = [&](const at::Tensor& p) {  // what is computed with
    std::vector<int64_t> sizes = p.sizes().vec();
    if (!is_dtensor(p)) return sizes;
    const auto& spec = DTensor(p).spec();
    Placements kept(spec.placements.begin(), spec.placements.end());
    for (size_t i = 0; i < kept.size(); i++)
      if (spec.mesh.names()[i] != "tp") kept[i] = Replicate();
    const auto local = local_sizes(kept, spec.mesh.shape(), *spec.mesh.get_coordinate(), sizes);
    return std::vector<int64_t>(local.begin(), local.end());
  };
  const auto mesh = init_device_mesh("cpu", plan.mesh.shape, plan.mesh.names);
  const Layout layout(plan.config, mesh, Layout::Values::None);
  Parameters parameters;
  for (const auto& item : layout.module().named_parameters()) {
    const auto& p = item.value();
    auto spec = is_dtensor(p) ? detail::meta_of(p).spec : SpecRef();
    auto local = p.sizes().vec();
    if (spec) local.assign(spec->local_sizes.begin(), spec->local_sizes.end());
    plan.parameters.push_back(
        {item.key(), p.sizes().vec(), local, spec ? placements_text(*spec) : "", bytes_of(local)});
    parameters.push_back({item.key(), tp_alone(p), std::move(spec)});
  }
  return parameters;
}

void append(std::vector<PlannedTraffic>& to, const std::vector<PlannedTraffic>& rows) {
  to.insert(to.end(), rows.begin(), rows.end());
}

}  // namespace

std::map<std::string, Traffic> TrainPlan::traffic_by_axis() const {
  std::map<std::string, Traffic> by_axis;
  for (const auto& row : traffic) {
    by_axis[row.axis].collectives += row.traffic.collectives;
    by_axis[row.axis].bytes += row.traffic.bytes;
  }
  return by_axis;
}

std::vector<std::string> reasons_against(const TrainConfig& config, int64_t ranks) {
  std::vector<std::string> reasons;
  const auto look = [&](const TrainConfig& c) {
    try {
      check(c, ranks);
    } catch (const UsageError& error) {
      const std::string reason = error.what_without_backtrace();
      if (std::find(reasons.begin(), reasons.end(), reason) == reasons.end()) reasons.push_back(reason);
    }
  };
  look(config);
  // check() stops at the first. A batch that divides shows what stands behind one that does not.
  auto other = config;
  other.training.accumulate = 1;
  other.training.batch = ranks;
  look(other);
  return reasons;
}

TrainPlan plan_training(const TrainConfig& config, int64_t ranks) {
  TESSERA_CHECK(ranks >= 1, UsageError, "a plan for ", ranks, " ranks; there is at least one");
  check(config, ranks);
  TrainPlan plan;
  plan.config = config;
  plan.mesh = mesh_shape(config, ranks);
  plan.ranks = ranks;
  const auto has = [&](const char* axis) {
    return std::find(plan.mesh.names.begin(), plan.mesh.names.end(), axis) != plan.mesh.names.end();
  };
  Parameters parameters;
  {
    const FakeWorld world(ranks);
    parameters = lay_out(plan);
    plan.parameter_bytes = bytes_of_ranks(plan.mesh, ranks, parameters);
    plan.memory = memory_of(plan, parameters);
    plan.traffic = planning::numbers_of_gradients(config, parameters);
    for (auto& p : parameters) p.spec.reset();  // of a mesh of this world
  }
  if (has("fsdp"))
    append(plan.traffic, planning::units_over_fsdp(config, plan.mesh, parameters));
  else if (extent(plan.mesh, "dp") > 1)
    append(plan.traffic, planning::gradients_over_dp(config, parameters));
  append(plan.traffic, planning::layers_over_tp(config, plan.mesh));
  std::stable_sort(plan.traffic.begin(), plan.traffic.end(),
                   [](const auto& a, const auto& b) { return a.axis < b.axis; });  // dp, fsdp, tp
  return plan;
}

}  // namespace tessera::train
