#pragma once
#include "tessera/mesh/device_mesh.h"
#include "tessera/models/sizes.h"

#include <iosfwd>
#include <string>
#include <string_view>

// The configuration of a training run, as plain values. `tessera train` sets it from flags and TOML files.
//
// Example:  TrainConfig config;
//           config.model.name = "gpt2-124m";
//           set_option(config, "parallel.mesh", "dp=2,tp=2");
//           check(config, 4);
namespace tessera::train {

// [model]: a model by name, with changed sizes.
struct ModelOptions {
  std::string name = "gpt-tiny";  // a name in models/sizes.h
  // Sizes that replace those of the named model. 0: as the named model.
  int64_t vocab_size = 0, max_seq_len = 0, layers = 0, heads = 0, kv_heads = 0, dim = 0, ffn_dim = 0;
  double dropout = -1;  // of GPT-2; negative: as the named model
  // A mixture of experts in a Llama (models/llama.h). 0 and negative: as the named model.
  int64_t experts = 0, top_k = 0;
  int64_t shared_experts = -1;
  double capacity_factor = -1, aux_loss_weight = -1, bias_update_rate = -1;
  // Memberwise.
  bool operator==(const ModelOptions&) const = default;
};

// [data]: training and validation data.
struct DataOptions {
  std::string path = "arithmetic";    // built-in addition problems, or a file
  std::string format = "auto";        // of the file; see data::TokenLayout
  std::string validation_path = "";   // validation file; empty: the end of `path`
  double validation_fraction = 0.05;  // fraction of `path` used for validation, if validation_path is empty
  int64_t digits = 2;                 // of the numbers in arithmetic
  int64_t seq_len = 0;                // tokens per sample; 0: the model's maximum. Arithmetic has its own length.
  std::string last_batch = "drop";    // "drop" or "pad" an incomplete last batch of an epoch
  int64_t prefetch = 2;               // batches that are read ahead
  // Memberwise.
  bool operator==(const DataOptions&) const = default;
};

// [parallel]: how the model is distributed.
struct ParallelOptions {
  // Axes: pp (pipeline stages), dp (replicated), fsdp (sharded), cp (parts of sequences), tp (tensor parallel), and ep
  // (experts), which has ranks of dp, fsdp and cp and adds none. Empty: dp.
  std::string mesh = "";
  bool fsdp = false;                         // treats the axis dp as fsdp
  std::string tp_plan = "";                  // file with a tensor-parallel plan; empty: the plan of the model
  bool sequence_parallel = false;            // shards activations along the sequence over tp
  bool loss_parallel = false;                // keeps logits sharded over tp for the loss
  std::string pipeline_schedule = "1F1B";    // of pp: a name of pipelining::PipelineSchedule
  int64_t pipeline_stages = 0;               // of the model; 0: one per rank of pp for GPipe and 1F1B, otherwise two
  int64_t microbatches = 0;                  // of pp; 0: the largest divisor of the rows of a rank up to 2 x pp
  std::string context_method = "ring";       // of cp: "ring" or "ulysses"
  std::string context_rotate = "allgather";  // of a ring: "allgather" or "alltoall"
  // Memberwise.
  bool operator==(const ParallelOptions&) const = default;
};

// [training]: steps, batch and how a step is computed.
struct TrainingOptions {
  int64_t steps = 1000;                // optimizer steps
  int64_t batch = 64;                  // global batch size in samples
  int64_t accumulate = 1;              // gradient accumulation steps
  std::string precision = "fp32";      // "fp32", "bf16" or "fp16"; parameters stay fp32
  bool activation_checkpoint = false;  // recomputes each block in backward
  bool compile = false;                // compiles the step
  std::string numerics = "default";    // "invariant": bits that do not depend on the mesh (docs/design/numerics.md)
  int64_t virtual_shards = 24;         // of a batch under invariant numerics; part of the definition of its sums
  uint64_t seed = 0;                   // of weights and data order
  std::string device = "cpu";          // "cpu" or "cuda"
  // Memberwise.
  bool operator==(const TrainingOptions&) const = default;
};

// [optimizer]: AdamW and the learning rate schedule.
struct OptimizerOptions {
  double lr = 1e-3;                              // peak learning rate
  double beta1 = 0.9, beta2 = 0.95, eps = 1e-8;  // of AdamW
  double weight_decay = 0.1;                     // of parameters with two or more dims; the others have none
  double clip = 1;                               // max gradient norm; 0: no clipping
  std::string schedule = "cosine";               // "constant", "cosine", "linear" or "wsd"
  int64_t warmup = 50;                           // warmup steps
  double min_factor = 0.1;                       // final learning rate as a fraction of lr
  double decay_share = 0.2;                      // fraction of the steps in the decay phase of wsd
  // Memberwise.
  bool operator==(const OptimizerOptions&) const = default;
};

// [eval]: validation and the generated sample.
struct EvalOptions {
  int64_t every = 0;           // steps between validations; 0: only at the end
  int64_t samples = 512;       // validation samples, at most
  double accuracy = 0;         // required exact-match accuracy at the end, 0 to 1; 0: none
  int64_t sample_tokens = 64;  // length of the text generated at the end; 0: none
  double temperature = -1;     // of the generated text; 0: greedy; negative: 0 for arithmetic, 0.8 for text
  // Memberwise.
  bool operator==(const EvalOptions&) const = default;
};

// [guard]: what to do when training goes wrong.
struct GuardOptions {
  std::string on_nan = "stop";    // "stop", "skip" or "ignore" a step whose loss or gradient norm is not finite
  std::string on_spike = "stop";  // "stop", "skip" or "ignore" a step with a loss spike
  double spike = 0;               // loss-spike threshold in standard deviations of the last 128 losses; 0: off
  int64_t checksum_every = 100;   // steps between comparisons of replicated parameters across ranks; 0: off
  // Memberwise.
  bool operator==(const GuardOptions&) const = default;
};

// [metrics]: what is written.
struct MetricsOptions {
  std::string output = "";  // output folder; empty: nothing is written
  int64_t log_every = 10;   // steps between log lines
  bool tensorboard = true;  // writes TensorBoard event files
  // Steps between histograms of weights and gradients in TensorBoard; 0: none.
  int64_t histograms_every = 0;
  // The step since the start of the run whose ops, collectives and memory every rank records for the report; 0: none.
  int64_t profile_step = 3;
  int64_t compare_numerics = 0;  // steps of a comparison with invariant numerics before the run; 0: none
  double peak_tflops = 0;        // peak of a rank's device, for MFU; 0: looked up by device name
  // Memberwise.
  bool operator==(const MetricsOptions&) const = default;
};

// [checkpoint]: saving and resuming.
struct CheckpointOptions {
  int64_t every = 0;        // steps between checkpoints, plus one at the end; 0: none
  std::string folder = "";  // parent of the checkpoints step-N; empty: checkpoints/ in the output folder
  int64_t keep = 3;         // checkpoints to keep; 0: all
  bool async = false;       // writes checkpoints in the background
  std::string resume = "";  // checkpoint to resume from, or "auto": the latest one in the folder, if any
  // Memberwise.
  bool operator==(const CheckpointOptions&) const = default;
};

// All options of a training run. One member per TOML table.
struct TrainConfig {
  ModelOptions model = {};            // [model]
  DataOptions data = {};              // [data]
  ParallelOptions parallel = {};      // [parallel]
  TrainingOptions training = {};      // [training]
  OptimizerOptions optimizer = {};    // [optimizer]
  EvalOptions eval = {};              // [eval]
  GuardOptions guard = {};            // [guard]
  MetricsOptions metrics = {};        // [metrics]
  CheckpointOptions checkpoint = {};  // [checkpoint]
  // Memberwise.
  bool operator==(const TrainConfig&) const = default;
};
// Prints TOML with the help text of each option as a comment.
std::ostream& operator<<(std::ostream& out, const TrainConfig& config);

// Sets one option from text, as in set_option(config, "training.steps", "100").
// Throws UsageError for an unknown key, with the nearest known key, for text of the wrong type, and for a number out of
// its range. The config is then unchanged.
void set_option(TrainConfig& config, std::string_view key, const std::string& text);

// The text of a value, as set_option() reads it. Numbers have the fewest digits that read back exactly.
std::string option_text(const std::string& value);
std::string option_text(bool value);
std::string option_text(int64_t value);
std::string option_text(uint64_t value);
std::string option_text(double value);

// The config of the named model with the changed sizes. Throws UsageError if the sizes do not fit together.
models::Config model_config(const ModelOptions& options);
// Tokens per sample. Throws UsageError if it exceeds the model's maximum.
int64_t sequence_length(const TrainConfig& config);

// The mesh shape for this number of ranks, with the axes in the order pp, dp, fsdp, cp, tp.
// Has the axes that parallel.mesh names, without ep. bf16 and fp16 need fsdp for mixed precision, so they add an axis
// fsdp of size 1 if it is missing. Throws UsageError if the mesh has another number of ranks or another axis.
MeshShape mesh_shape(const TrainConfig& config, int64_t ranks);
// Ranks of parallel.mesh; 0 if it is empty. The axis ep adds none.
int64_t ranks_of(const ParallelOptions& options);
// The size of the axis ep of parallel.mesh; 1 if it has none. The axis has `ep` consecutive ranks of the product of dp,
// fsdp and cp; the other ranks of the product have the same experts.
int64_t expert_ranks(const ParallelOptions& options);
// The size of an axis; 1 if the mesh does not have it.
int64_t extent(const MeshShape& mesh, std::string_view axis);

// The folder of the checkpoints; "" if neither it nor the output folder is set.
std::string checkpoint_folder(const TrainConfig& config);

// Checks everything that needs no data, ranks or memory: allowed values, ranges, divisibility of the batch by the
// data-parallel ranks and microbatches, of the heads by tp, of the sequence by cp and of the experts by ep, and the
// pipeline schedule. Throws UsageError for the first problem.
void check(const TrainConfig& config, int64_t ranks);

// The plan by which parallelize_module() shards the model over tp.
Plan tensor_parallel_plan(const TrainConfig& config);

}  // namespace tessera::train
