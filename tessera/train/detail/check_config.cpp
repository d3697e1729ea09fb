// Checks a config, and computes values that depend on several options.
#include "tessera/base/detail/nearest_names.h"
#include "tessera/base/error.h"
#include "tessera/data/token_file.h"
#include "tessera/train/config.h"
#include "tessera/train/detail/config_options.h"

#include <algorithm>

namespace tessera::train {
namespace {

constexpr const char* kAxes[] = {"dp", "fsdp", "tp"};  // in the order of the mesh

struct AllowedValues {
  const char* key;
  const std::string& value;
  std::vector<std::string> allowed;
};

void check_allowed_values(const TrainConfig& c) {
  const std::vector<std::string> actions{"stop", "skip", "ignore"};
  for (const auto& w :
       std::vector<AllowedValues>{{"data.last_batch", c.data.last_batch, {"drop", "pad"}},
                                  {"training.precision", c.training.precision, {"fp32", "bf16", "fp16"}},
                                  {"training.device", c.training.device, {"cpu", "cuda"}},
                                  {"optimizer.schedule", c.optimizer.schedule, {"constant", "cosine", "linear", "wsd"}},
                                  {"guard.on_nan", c.guard.on_nan, actions},
                                  {"guard.on_spike", c.guard.on_spike, actions}}) {
    if (std::find(w.allowed.begin(), w.allowed.end(), w.value) != w.allowed.end()) continue;
    std::string list;
    for (const auto& word : w.allowed) list += (list.empty() ? "" : ", ") + word;
    TESSERA_FAIL(UsageError, w.key, " is '", w.value, "'; allowed: ", list);
  }
  data::parse_token_layout(c.data.format);
}

// set_option() checks the same. A program can set the fields directly.
void check_ranges(const TrainConfig& c) {
  visit_options(c, [&](const OptionInfo& info, const auto& value) {
    if constexpr (std::is_arithmetic_v<std::remove_cvref_t<decltype(value)>>)
      TESSERA_CHECK(!info.range || info.range->contains(static_cast<double>(value)), UsageError, info.key, " is ",
                    option_text(value), "; it must be ", *info.range);
  });
}

std::string divisors(int64_t n) {
  std::string text;
  for (int64_t d = 1; d <= n; d++)
    if (n % d == 0) text += (text.empty() ? "" : ", ") + std::to_string(d);
  return text;
}

void check_heads(const TrainConfig& c, int64_t tp) {
  if (!c.parallel.tp_plan.empty()) return;  // a custom plan may not shard the heads
  const auto config = model_config(c.model);
  const auto divides = [&](const char* what, int64_t heads) {
    TESSERA_CHECK(heads % tp == 0, UsageError, c.model.name, " has ", heads, " ", what,
                  ", which are not divisible by tp=", tp, "; use tp of ", divisors(heads));
  };
  if (const auto* gpt = std::get_if<models::GPT2Config>(&config)) {
    divides("heads", gpt->n_head);
  } else {
    const auto& llama = std::get<models::LlamaConfig>(config);
    divides("heads", llama.n_heads);
    divides("key/value heads", llama.n_kv_heads);
  }
}

void set_if_positive(int64_t& field, int64_t value) {
  if (value > 0) field = value;
}
void check_not_set(const char* key, bool is_set, const std::string& model) {
  TESSERA_CHECK(!is_set, UsageError, key, " is set, but ", model, " has no such option");
}

MeshShape parse_mesh(const ParallelOptions& options, int64_t ranks) {
  if (options.mesh.empty()) return {{ranks}, {"dp"}};
  auto mesh = parse_mesh_shape(options.mesh);
  TESSERA_CHECK(!mesh.names.empty(), UsageError, "mesh '", options.mesh,
                "' has no axis names; name each axis dp, fsdp or tp, as in dp=2,tp=2");
  return mesh;
}

}  // namespace

models::Config model_config(const ModelOptions& o) {
  auto config = models::find_config(o.name);
  if (auto* gpt = std::get_if<models::GPT2Config>(&config)) {
    check_not_set("model.kv_heads", o.kv_heads > 0, o.name);
    check_not_set("model.ffn_dim", o.ffn_dim > 0, o.name);
    set_if_positive(gpt->vocab_size, o.vocab_size), set_if_positive(gpt->max_seq_len, o.max_seq_len);
    set_if_positive(gpt->n_layer, o.layers), set_if_positive(gpt->n_head, o.heads), set_if_positive(gpt->n_embd, o.dim);
    if (o.dropout >= 0) gpt->dropout = o.dropout;
    models::check(*gpt);
  } else {
    auto& llama = std::get<models::LlamaConfig>(config);
    check_not_set("model.dropout", o.dropout > 0, o.name);
    set_if_positive(llama.vocab_size, o.vocab_size), set_if_positive(llama.max_seq_len, o.max_seq_len);
    set_if_positive(llama.n_layers, o.layers), set_if_positive(llama.n_heads, o.heads);
    set_if_positive(llama.dim, o.dim);
    set_if_positive(llama.n_kv_heads, o.kv_heads), set_if_positive(llama.ffn_dim, o.ffn_dim);
    models::check(llama);
  }
  return config;
}

int64_t sequence_length(const TrainConfig& c) {
  const auto config = model_config(c.model);
  const int64_t max = std::visit([](const auto& m) { return m.max_seq_len; }, config);
  const int64_t length = c.data.path == "arithmetic" ? 3 * c.data.digits + 2
                         : c.data.seq_len == 0       ? max
                                                     : c.data.seq_len;
  TESSERA_CHECK(length <= max, UsageError, "samples have ", length, " tokens, but ", c.model.name, " takes at most ",
                max, "; change data.seq_len or model.max_seq_len");
  return length;
}

int64_t ranks_of(const ParallelOptions& options) {
  if (options.mesh.empty()) return 0;
  int64_t ranks = 1;
  for (const auto n : parse_mesh(options, 1).shape)
    TESSERA_CHECK(!__builtin_mul_overflow(ranks, n, &ranks) && ranks <= kMaxRanks, UsageError, "mesh '", options.mesh,
                  "' has more than ", kMaxRanks, " ranks");
  return ranks;
}

int64_t extent(const MeshShape& mesh, std::string_view axis) {
  for (size_t i = 0; i < mesh.names.size(); i++)
    if (mesh.names[i] == axis) return mesh.shape[i];
  return 1;
}

MeshShape mesh_shape(const TrainConfig& config, int64_t ranks) {
  auto requested = parse_mesh(config.parallel, ranks);
  for (auto& name : requested.names) {
    TESSERA_CHECK(std::find(std::begin(kAxes), std::end(kAxes), name) != std::end(kAxes), UsageError, "mesh '",
                  config.parallel.mesh, "': unknown axis '", name,
                  "'; allowed: dp (replicated), fsdp (sharded) and tp (tensor parallel)");
    if (name == "dp" && config.parallel.fsdp) name = "fsdp";
  }
  TESSERA_CHECK(std::count(requested.names.begin(), requested.names.end(), "fsdp") <= 1, UsageError, "mesh '",
                config.parallel.mesh, "' has an axis fsdp, and --fsdp renames dp to fsdp; remove one of them");
  if (const int64_t mesh_ranks = ranks_of(config.parallel); mesh_ranks != 0)
    TESSERA_CHECK(mesh_ranks == ranks, UsageError, "mesh '", config.parallel.mesh, "' needs ", mesh_ranks,
                  " ranks, but there are ", ranks);
  MeshShape mesh;
  for (const char* axis : kAxes) {
    const bool is_requested = std::find(requested.names.begin(), requested.names.end(), axis) != requested.names.end();
    const bool is_needed = axis == std::string_view("fsdp") && config.training.precision != "fp32";
    if (!is_requested && !is_needed) continue;
    mesh.names.emplace_back(axis);
    mesh.shape.push_back(extent(requested, axis));
  }
  return mesh;
}

std::string checkpoint_folder(const TrainConfig& c) {
  if (!c.checkpoint.folder.empty() || c.metrics.output.empty()) return c.checkpoint.folder;
  return c.metrics.output + "/checkpoints";
}

void check(const TrainConfig& c, int64_t ranks) {
  TESSERA_CHECK(ranks >= 1 && ranks <= kMaxRanks, UsageError, "the number of ranks is ", ranks,
                "; it must be from 1 to ", kMaxRanks);
  check_allowed_values(c);
  check_ranges(c);
  TESSERA_CHECK(c.checkpoint.resume != "auto" || !checkpoint_folder(c).empty(), UsageError,
                "--resume auto needs --output or --checkpoint-folder: by default, each run has a new output folder");
  model_config(c.model);
  sequence_length(c);
  const auto mesh = mesh_shape(c, ranks);
  const int64_t data_ranks = extent(mesh, "dp") * extent(mesh, "fsdp"), tp = extent(mesh, "tp");
  TESSERA_CHECK(c.training.batch % (data_ranks * c.training.accumulate) == 0, UsageError, "a batch of ",
                c.training.batch, " samples is not divisible by ", data_ranks, " data-parallel ranks x ",
                c.training.accumulate, " accumulation steps; use a multiple of ", data_ranks * c.training.accumulate);
  if (tp > 1) {
    check_heads(c, tp);
    tensor_parallel_plan(c);
  }
}

}  // namespace tessera::train
