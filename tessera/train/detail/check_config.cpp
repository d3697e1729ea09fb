// What can be wrong with a config, and what its parts come to together.
#include "tessera/base/error.h"
#include "tessera/base/detail/nearest_names.h"
#include "tessera/data/token_file.h"
#include "tessera/train/config.h"

#include <algorithm>

namespace tessera::train {
namespace {

constexpr const char* kAxes[] = {"dp", "fsdp", "tp"};  // in the order of the mesh

struct Words {
  const char* key;
  const std::string& value;
  std::vector<std::string> allowed;
};

void check_words(const TrainConfig& c) {
  const std::vector<std::string> reactions{"stop", "skip", "ignore"};
  for (const auto& w :
       std::vector<Words>{{"data.last_batch", c.data.last_batch, {"drop", "pad"}},
                          {"training.precision", c.training.precision, {"fp32", "bf16", "fp16"}},
                          {"training.device", c.training.device, {"cpu", "cuda"}},
                          {"optimizer.schedule", c.optimizer.schedule, {"constant", "cosine", "linear", "wsd"}},
                          {"guard.on_nan", c.guard.on_nan, reactions},
                          {"guard.on_spike", c.guard.on_spike, reactions}}) {
    if (std::find(w.allowed.begin(), w.allowed.end(), w.value) != w.allowed.end()) continue;
    std::string list;
    for (const auto& word : w.allowed) list += (list.empty() ? "" : ", ") + word;
    TESSERA_FAIL(UsageError, w.key, " is '", w.value, "'; it is one of: ", list);
  }
  data::parse_token_layout(c.data.format);
}

template <class T>
struct Range {
  const char* key;
  T value, least;
};

void check_ranges(const TrainConfig& c) {
  for (const auto& r : std::vector<Range<int64_t>>{{"training.steps", c.training.steps, 1},
                                                   {"training.batch", c.training.batch, 1},
                                                   {"training.accumulate", c.training.accumulate, 1},
                                                   {"data.seq_len", c.data.seq_len, 0},
                                                   {"data.prefetch", c.data.prefetch, 1},
                                                   {"optimizer.warmup", c.optimizer.warmup, 0},
                                                   {"eval.every", c.eval.every, 0},
                                                   {"eval.samples", c.eval.samples, 1},
                                                   {"eval.sample_tokens", c.eval.sample_tokens, 0},
                                                   {"guard.checksum_every", c.guard.checksum_every, 0},
                                                   {"checkpoint.every", c.checkpoint.every, 0},
                                                   {"checkpoint.keep", c.checkpoint.keep, 0},
                                                   {"metrics.log_every", c.metrics.log_every, 1}})
    TESSERA_CHECK(r.value >= r.least, UsageError, r.key, " is ", r.value, "; it is at least ", r.least);
  for (const auto& r : std::vector<Range<double>>{{"optimizer.lr", c.optimizer.lr, 0},
                                                  {"optimizer.clip", c.optimizer.clip, 0},
                                                  {"optimizer.weight_decay", c.optimizer.weight_decay, 0},
                                                  {"optimizer.min_factor", c.optimizer.min_factor, 0},
                                                  {"eval.temperature", c.eval.temperature, 0},
                                                  {"guard.spike", c.guard.spike, 0},
                                                  {"metrics.peak_tflops", c.metrics.peak_tflops, 0}})
    TESSERA_CHECK(r.value >= r.least, UsageError, r.key, " is ", r.value, "; it is at least ", r.least);
  TESSERA_CHECK(c.optimizer.decay_share > 0 && c.optimizer.decay_share <= 1, UsageError, "optimizer.decay_share is ",
                c.optimizer.decay_share, "; it is above 0 and at most 1");
  TESSERA_CHECK(c.eval.accuracy >= 0 && c.eval.accuracy <= 1, UsageError, "eval.accuracy is ", c.eval.accuracy,
                "; it is a share, from 0 to 1");
}

std::string divisors(int64_t n) {
  std::string text;
  for (int64_t d = 1; d <= n; d++)
    if (n % d == 0) text += (text.empty() ? "" : ", ") + std::to_string(d);
  return text;
}

void check_heads(const TrainConfig& c, int64_t tp) {
  if (!c.parallel.tp_plan.empty()) return;  // it may not cut them
  const auto config = model_config(c.model);
  const auto divides = [&](const char* what, int64_t heads) {
    TESSERA_CHECK(heads % tp == 0, UsageError, c.model.name, " has ", heads, " ", what, ", which tp=", tp,
                  " does not divide; take tp of ", divisors(heads));
  };
  if (const auto* gpt = std::get_if<models::GPT2Config>(&config)) {
    divides("heads", gpt->n_head);
  } else {
    const auto& llama = std::get<models::LlamaConfig>(config);
    divides("heads", llama.n_heads);
    divides("heads of keys and values", llama.n_kv_heads);
  }
}

void set_if_asked(int64_t& field, int64_t asked) {
  if (asked > 0) field = asked;
}
void not_for(const char* key, bool asked, const std::string& model) {
  TESSERA_CHECK(!asked, UsageError, key, " is no size of ", model);
}

MeshShape given_mesh(const ParallelOptions& options, int64_t ranks) {
  if (options.mesh.empty()) return {{ranks}, {"dp"}};
  auto mesh = parse_mesh_shape(options.mesh);
  TESSERA_CHECK(!mesh.names.empty(), UsageError, "mesh '", options.mesh,
                "' has no names; training needs to know what each axis is for: dp, fsdp or tp, as in dp=2,tp=2");
  return mesh;
}

}  // namespace

models::Config model_config(const ModelOptions& o) {
  auto config = models::find_config(o.name);
  if (auto* gpt = std::get_if<models::GPT2Config>(&config)) {
    not_for("model.kv_heads", o.kv_heads > 0, o.name);
    not_for("model.ffn_dim", o.ffn_dim > 0, o.name);
    set_if_asked(gpt->vocab_size, o.vocab_size), set_if_asked(gpt->max_seq_len, o.max_seq_len);
    set_if_asked(gpt->n_layer, o.layers), set_if_asked(gpt->n_head, o.heads), set_if_asked(gpt->n_embd, o.dim);
    if (o.dropout >= 0) gpt->dropout = o.dropout;
    models::check(*gpt);
  } else {
    auto& llama = std::get<models::LlamaConfig>(config);
    not_for("model.dropout", o.dropout > 0, o.name);
    set_if_asked(llama.vocab_size, o.vocab_size), set_if_asked(llama.max_seq_len, o.max_seq_len);
    set_if_asked(llama.n_layers, o.layers), set_if_asked(llama.n_heads, o.heads), set_if_asked(llama.dim, o.dim);
    set_if_asked(llama.n_kv_heads, o.kv_heads), set_if_asked(llama.ffn_dim, o.ffn_dim);
    models::check(llama);
  }
  return config;
}

int64_t sequence_length(const TrainConfig& c) {
  const auto config = model_config(c.model);
  const int64_t most = std::visit([](const auto& m) { return m.max_seq_len; }, config);
  const int64_t length = c.data.path == "arithmetic" ? 3 * c.data.digits + 2
                         : c.data.seq_len == 0       ? most
                                                     : c.data.seq_len;
  TESSERA_CHECK(length <= most, UsageError, "samples have ", length, " tokens, and ", c.model.name, " takes ", most,
                " at most; see model.max_seq_len and data.seq_len");
  return length;
}

int64_t ranks_of(const ParallelOptions& options) {
  if (options.mesh.empty()) return 0;
  int64_t ranks = 1;
  for (const auto n : given_mesh(options, 1).shape) ranks *= n;
  return ranks;
}

int64_t extent(const MeshShape& mesh, std::string_view axis) {
  for (size_t i = 0; i < mesh.names.size(); i++)
    if (mesh.names[i] == axis) return mesh.shape[i];
  return 1;
}

MeshShape mesh_shape(const TrainConfig& config, int64_t ranks) {
  auto given = given_mesh(config.parallel, ranks);
  for (auto& name : given.names) {
    TESSERA_CHECK(std::find(std::begin(kAxes), std::end(kAxes), name) != std::end(kAxes), UsageError, "mesh '",
                  config.parallel.mesh, "': there is no axis '", name,
                  "' in training; there are dp (copies), fsdp (cut over data) and tp (cut inside layers)");
    if (name == "dp" && config.parallel.fsdp) name = "fsdp";
  }
  TESSERA_CHECK(std::count(given.names.begin(), given.names.end(), "fsdp") <= 1, UsageError, "mesh '",
                config.parallel.mesh, "' has an axis fsdp, and --fsdp makes one of dp; leave one of them out");
  if (const int64_t asked = ranks_of(config.parallel); asked != 0)
    TESSERA_CHECK(asked == ranks, UsageError, "mesh '", config.parallel.mesh, "' has ", asked, " ranks, and ", ranks,
                  " are there");
  MeshShape mesh;
  for (const char* axis : kAxes) {
    const bool asked = std::find(given.names.begin(), given.names.end(), axis) != given.names.end();
    const bool computes = axis == std::string_view("fsdp") && config.training.precision != "fp32";
    if (!asked && !computes) continue;
    mesh.names.emplace_back(axis);
    mesh.shape.push_back(extent(given, axis));
  }
  return mesh;
}

std::string checkpoint_folder(const TrainConfig& c) {
  if (!c.checkpoint.folder.empty() || c.metrics.output.empty()) return c.checkpoint.folder;
  return c.metrics.output + "/checkpoints";
}

void check(const TrainConfig& c, int64_t ranks) {
  check_words(c);
  check_ranges(c);
  TESSERA_CHECK(
      c.checkpoint.resume != "auto" || !checkpoint_folder(c).empty(), UsageError,
      "--resume auto looks for checkpoints, and each training has an output folder of its own; say which with "
      "--output or --checkpoint-folder");
  model_config(c.model);
  sequence_length(c);
  const auto mesh = mesh_shape(c, ranks);
  const int64_t data_ranks = extent(mesh, "dp") * extent(mesh, "fsdp"), tp = extent(mesh, "tp");
  TESSERA_CHECK(c.training.batch % (data_ranks * c.training.accumulate) == 0, UsageError, "a batch of ",
                c.training.batch, " samples does not divide by ", data_ranks, " data-parallel ranks times ",
                c.training.accumulate, " parts; take a multiple of ", data_ranks * c.training.accumulate);
  if (tp > 1) {
    check_heads(c, tp);
    tensor_parallel_plan(c);
  }
}

}  // namespace tessera::train
