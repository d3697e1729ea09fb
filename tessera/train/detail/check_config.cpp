// Checks a config, and computes values that depend on several options.
#include "tessera/base/detail/nearest_names.h"
#include "tessera/base/error.h"
#include "tessera/data/token_file.h"
#include "tessera/train/config.h"
#include "tessera/train/detail/config_options.h"
#include "tessera/train/detail/pipeline_shape.h"

#include <algorithm>

namespace tessera::train {
namespace {

constexpr const char* kAxes[] = {"pp", "dp", "fsdp", "cp", "tp"};  // in the order of the mesh

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
                                  {"training.numerics", c.training.numerics, {"default", "invariant"}},
                                  {"optimizer.schedule", c.optimizer.schedule, {"constant", "cosine", "linear", "wsd"}},
                                  {"parallel.context_method", c.parallel.context_method, {"ring", "ulysses"}},
                                  {"parallel.context_rotate", c.parallel.context_rotate, {"allgather", "alltoall"}},
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

int64_t block_count(const models::GPT2Config& c) { return c.n_layer; }
int64_t block_count(const models::LlamaConfig& c) { return c.n_layers; }

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

bool has_name(const MeshShape& mesh, std::string_view axis) {
  return std::find(mesh.names.begin(), mesh.names.end(), axis) != mesh.names.end();
}

void check_pipeline(const TrainConfig& c, const MeshShape& mesh) {
  const auto& p = c.parallel;
  const std::string schedule = pipelining::canonical_name(p.pipeline_schedule);
  if (!has_name(mesh, "pp")) {
    TESSERA_CHECK(p.microbatches == 0, UsageError, "parallel.microbatches is ", p.microbatches, ", but mesh '", p.mesh,
                  "' has no axis pp; add pp, as in pp=2, or use --accumulate ", p.microbatches);
    TESSERA_CHECK(p.pipeline_stages == 0, UsageError, "parallel.pipeline_stages is ", p.pipeline_stages, ", but mesh '",
                  p.mesh, "' has no axis pp; add pp, as in pp=2");
    TESSERA_CHECK(p.pipeline_schedule == ParallelOptions().pipeline_schedule, UsageError, "the pipeline schedule is ",
                  schedule, ", but mesh '", p.mesh, "' has no axis pp; add pp, as in pp=2");
    return;
  }
  const int64_t pp = extent(mesh, "pp"), rows = c.training.batch / (extent(mesh, "dp") * extent(mesh, "fsdp"));
  TESSERA_CHECK(c.training.accumulate == 1, UsageError, "training.accumulate is ", c.training.accumulate,
                ", but mesh '", p.mesh, "' has an axis pp, whose microbatches accumulate; use --microbatches ",
                c.training.accumulate * pp, " and remove --accumulate");
  TESSERA_CHECK(!c.training.compile || !has_name(mesh, "fsdp"), UsageError, "training.compile is set, but mesh '",
                p.mesh, "' has the axes pp and fsdp (and so has bf16 and fp16): stages of fsdp run eagerly; use dp in ",
                "place of fsdp, or remove --compile");
  TESSERA_CHECK(p.pipeline_stages % pp == 0, UsageError, "parallel.pipeline_stages is ", p.pipeline_stages,
                ", which is not divisible by pp=", pp, "; use ", pp, " or ", 2 * pp);
  const auto shape = pipeline_shape(c, mesh);
  TESSERA_CHECK(rows % shape.microbatches == 0, UsageError, "a rank has ", rows, " rows of a batch of ",
                c.training.batch, ", which are not divisible by ", shape.microbatches,
                " microbatches; use --microbatches of ", divisors(rows));
  pipelining::check_schedule(schedule, shape);
  const auto model = model_config(c.model);
  const int64_t layers = 2 + std::visit([](const auto& m) { return block_count(m); }, model);
  TESSERA_CHECK(shape.stages() <= layers, UsageError, schedule, " on pp=", pp, " has ", shape.stages(), " stages, and ",
                c.model.name, " has ", layers, " layers (", layers - 2,
                " blocks, embedding and head): use fewer stages, or --layers ", shape.stages() - 2);
  const bool is_v = pipelining::stage_ranks(schedule, shape).back() == 0 && pp > 1;
  TESSERA_CHECK(!is_v || !has_name(mesh, "fsdp") || !has_tied_embedding(model), UsageError, schedule,
                " gives one rank the first and the last stage, which share the embedding of ", c.model.name,
                ", and fsdp (and so bf16 and fp16) shards a parameter in one stage only; use --pipeline-schedule ",
                "Interleaved1F1B or InterleavedZeroBubble, or a mesh without fsdp");
}

void check_context(const TrainConfig& c, const MeshShape& mesh) {
  const int64_t cp = extent(mesh, "cp"), length = sequence_length(c);
  if (cp == 1) return;
  const bool ulysses = c.parallel.context_method == "ulysses";
  const int64_t parts = ulysses ? cp : 2 * cp;
  TESSERA_CHECK(length % parts == 0, UsageError, "samples have ", length, " tokens, which are not divisible by ", parts,
                " (cp=", cp, ulysses ? "" : " x 2 parts per rank, for balance", "); use --seq-len ",
                length / parts > 0 ? length / parts * parts : parts,
                c.data.path == "arithmetic" ? " with a data file, or other --digits" : "");
  TESSERA_CHECK(!c.training.compile, UsageError, "training.compile is set, but mesh '", c.parallel.mesh,
                "' has an axis cp, which the compiler does not support; remove --compile");
  const auto model = model_config(c.model);
  const auto* gpt = std::get_if<models::GPT2Config>(&model);
  TESSERA_CHECK(!gpt || gpt->dropout == 0, UsageError, "model.dropout is ", gpt ? gpt->dropout : 0,
                ", which attention over cp does not support; use --model.dropout 0");
  const int64_t heads = (gpt ? gpt->n_head : std::get<models::LlamaConfig>(model).n_heads) / extent(mesh, "tp");
  TESSERA_CHECK(!ulysses || heads % cp == 0, UsageError, "ulysses divides ", heads, " heads of a rank among cp=", cp,
                " ranks; use cp of ", divisors(heads), ", or --context-method ring");
  TESSERA_CHECK(c.training.device == "cpu" || !c.training.activation_checkpoint, UsageError,
                "training.activation_checkpoint on ", c.training.device, " recomputes attention on another thread, ",
                "outside of the context-parallel scope; remove --activation-checkpoint or the axis cp");
}

void check_experts(const TrainConfig& c, const MeshShape& mesh) {
  const int64_t ep = expert_ranks(c.parallel);
  if (ep == 1) return;
  const int64_t ranks = extent(mesh, "dp") * extent(mesh, "fsdp") * extent(mesh, "cp");
  TESSERA_CHECK(ranks % ep == 0, UsageError, "mesh '", c.parallel.mesh, "': ep=", ep,
                " has ranks of dp, fsdp and cp, and does not divide their product ", ranks, "; use ep of ",
                divisors(ranks), ", or add dp=", ep);
  const auto model = model_config(c.model);
  const auto* llama = std::get_if<models::LlamaConfig>(&model);
  const int64_t experts = llama ? llama->moe.n_experts : 0;
  TESSERA_CHECK(experts > 0, UsageError, "mesh '", c.parallel.mesh, "' has an axis ep, and ", c.model.name,
                " has no experts; use --model mixtral-tiny or --experts ", 2 * ep, " with a Llama, or remove ep");
  TESSERA_CHECK(experts % ep == 0, UsageError, c.model.name, " has ", experts,
                " experts, which are not divisible by ep=", ep, "; use ep of ", divisors(experts));
  TESSERA_CHECK(!c.training.compile, UsageError, "training.compile is set, but mesh '", c.parallel.mesh,
                "' has an axis ep, which the compiler does not support; remove --compile");
}

// What has no invariant form is refused by name.
void check_numerics(const TrainConfig& c, const MeshShape& mesh) {
  if (c.training.numerics != "invariant") return;
  const auto refuse = [](bool is_set, const std::string& what, const char* instead) {
    TESSERA_CHECK(!is_set, UsageError, "training.numerics is invariant, which does not cover ", what, "; ", instead);
  };
  const auto axis = [&](const char* name) { return c10::str("the axis ", name, " of mesh '", c.parallel.mesh, "'"); };
  const bool has_context = extent(mesh, "cp") > 1;
  refuse(has_context && c.parallel.context_method != "ulysses", axis("cp") + " with ring attention",
         "use --context-method ulysses");
  refuse(has_context && extent(mesh, "pp") > 1, axis("cp") + " beside pp", "use cp with dp, fsdp or tp");
  refuse(expert_ranks(c.parallel) > 1, axis("ep"), "whose ranks add rows of several virtual shards; remove it");
  const auto model = model_config(c.model);
  const auto* gpt = std::get_if<models::GPT2Config>(&model);
  refuse(gpt && gpt->dropout > 0, "dropout", "use --model.dropout 0");
  refuse(c.training.precision != "fp32", "--precision " + c.training.precision, "use fp32");
  refuse(c.training.device != "cpu", "--device " + c.training.device, "use cpu");
  const int64_t shards = c.training.virtual_shards, data_ranks = extent(mesh, "dp") * extent(mesh, "fsdp");
  TESSERA_CHECK(c.training.batch % shards == 0, UsageError, "a batch of ", c.training.batch,
                " samples is not divisible by ", shards, " virtual shards; use --batch ",
                (c.training.batch + shards - 1) / shards * shards, " or --virtual-shards of ",
                divisors(c.training.batch));
  TESSERA_CHECK(shards % data_ranks == 0, UsageError, shards, " virtual shards are not divisible by ", data_ranks,
                " data-parallel ranks; use dp x fsdp of ", divisors(shards));
  const int64_t microbatches = c.parallel.microbatches;
  TESSERA_CHECK(extent(mesh, "pp") == 1 || microbatches == 0 || microbatches == shards / data_ranks, UsageError,
                "parallel.microbatches is ", microbatches, ", and with invariant numerics each of the ",
                shards / data_ranks, " virtual shards of a rank is a microbatch; remove --microbatches");
  const auto shape = pipeline_shape(c, mesh);
  const auto pipeline = pipelining::canonical_name(c.parallel.pipeline_schedule);
  refuse(shape.stages() > 1 && has_tied_embedding(model) && pipelining::stage_ranks(pipeline, shape).back() == 0,
         "a tied embedding whose two stages are on one rank", "use another --pipeline-schedule, or a Llama");
}

void set_if_positive(int64_t& field, int64_t value) {
  if (value > 0) field = value;
}
void set_if_not_negative(auto& field, auto value) {
  if (value >= 0) field = value;
}
void check_not_set(const char* key, bool is_set, const std::string& model) {
  TESSERA_CHECK(!is_set, UsageError, key, " is set, but ", model, " has no such option");
}

MeshShape parse_mesh(const ParallelOptions& options, int64_t ranks) {
  if (options.mesh.empty()) return {{ranks}, {"dp"}};
  auto mesh = parse_mesh_shape(options.mesh);
  TESSERA_CHECK(!mesh.names.empty(), UsageError, "mesh '", options.mesh,
                "' has no axis names; name each axis pp, dp, fsdp, cp, tp or ep, as in dp=2,tp=2");
  return mesh;
}

}  // namespace

models::Config model_config(const ModelOptions& o) {
  auto config = models::find_config(o.name);
  if (auto* gpt = std::get_if<models::GPT2Config>(&config)) {
    check_not_set("model.kv_heads", o.kv_heads > 0, o.name);
    check_not_set("model.ffn_dim", o.ffn_dim > 0, o.name);
    check_not_set("model.experts", o.experts > 0, o.name);
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
    auto& moe = llama.moe;
    set_if_positive(moe.n_experts, o.experts), set_if_positive(moe.top_k, o.top_k);
    set_if_not_negative(moe.n_shared_experts, o.shared_experts);
    set_if_not_negative(moe.capacity_factor, o.capacity_factor);
    set_if_not_negative(moe.aux_loss_weight, o.aux_loss_weight);
    set_if_not_negative(moe.bias_update_rate, o.bias_update_rate);
    models::check(llama);
  }
  const auto* llama = std::get_if<models::LlamaConfig>(&config);
  if (!llama || llama->moe.n_experts == 0)
    for (const auto& [key, is_set] :
         {std::pair("model.top_k", o.top_k > 0), std::pair("model.shared_experts", o.shared_experts > 0),
          std::pair("model.capacity_factor", o.capacity_factor > 0),
          std::pair("model.aux_loss_weight", o.aux_loss_weight > 0),
          std::pair("model.bias_update_rate", o.bias_update_rate > 0)})
      TESSERA_CHECK(!is_set, UsageError, key, " is set, but ", o.name, " has no experts; set model.experts of a Llama");
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
  const auto mesh = parse_mesh(options, 1);
  for (size_t i = 0; i < mesh.shape.size(); i++) {
    if (mesh.names[i] == "ep") continue;
    TESSERA_CHECK(!__builtin_mul_overflow(ranks, mesh.shape[i], &ranks) && ranks <= kMaxRanks, UsageError, "mesh '",
                  options.mesh, "' has more than ", kMaxRanks, " ranks");
  }
  return ranks;
}

int64_t expert_ranks(const ParallelOptions& options) {
  return options.mesh.empty() ? 1 : extent(parse_mesh(options, 1), "ep");
}

pipelining::PipelineShape pipeline_shape(const TrainConfig& c, const MeshShape& mesh) {
  const int64_t pp = extent(mesh, "pp"), rows = c.training.batch / (extent(mesh, "dp") * extent(mesh, "fsdp"));
  const std::string schedule = pipelining::canonical_name(c.parallel.pipeline_schedule);
  pipelining::PipelineShape shape{pp, schedule == "GPipe" || schedule == "1F1B" ? 1 : 2, c.parallel.microbatches};
  if (c.parallel.pipeline_stages > 0) shape.stages_per_rank = c.parallel.pipeline_stages / pp;
  if (shape.microbatches == 0 && c.training.numerics == "invariant" && pp > 1)
    shape.microbatches = c.training.virtual_shards / (extent(mesh, "dp") * extent(mesh, "fsdp"));
  if (shape.microbatches == 0)
    for (shape.microbatches = std::max<int64_t>(1, std::min(rows, 2 * pp)); rows % shape.microbatches != 0;)
      shape.microbatches--;
  return shape;
}

bool has_tied_embedding(const models::Config& config) {
  const auto* llama = std::get_if<models::LlamaConfig>(&config);
  return !llama || llama->tied;
}

int64_t extent(const MeshShape& mesh, std::string_view axis) {
  for (size_t i = 0; i < mesh.names.size(); i++)
    if (mesh.names[i] == axis) return mesh.shape[i];
  return 1;
}

MeshShape mesh_shape(const TrainConfig& config, int64_t ranks) {
  auto requested = parse_mesh(config.parallel, ranks);
  for (auto& name : requested.names) {
    TESSERA_CHECK(name == "ep" || std::find(std::begin(kAxes), std::end(kAxes), name) != std::end(kAxes), UsageError,
                  "mesh '", config.parallel.mesh, "': unknown axis '", name,
                  "'; allowed: pp (pipeline stages), dp (replicated), fsdp (sharded), cp (parts of sequences), tp ",
                  "(tensor parallel) and ep (experts, on ranks of dp, fsdp and cp)");
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
  check_pipeline(c, mesh);
  check_context(c, mesh);
  check_experts(c, mesh);
  check_numerics(c, mesh);
}

}  // namespace tessera::train
