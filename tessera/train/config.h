#pragma once
#include "tessera/mesh/device_mesh.h"
#include "tessera/models/plans.h"
#include "tessera/models/sizes.h"

#include <iosfwd>
#include <string>
#include <string_view>

// What a training is to be, as a value: a plan can be made from it alone, on no hardware. Nothing here runs anything.
namespace tessera::train {

struct ModelOptions {
  std::string name = "gpt-tiny";
  // 0 or less: as the model of that name has it.
  int64_t vocab_size = 0, max_seq_len = 0, layers = 0, heads = 0, kv_heads = 0, dim = 0, ffn_dim = 0;
  double dropout = -1;
  bool operator==(const ModelOptions&) const = default;
};

struct DataOptions {
  std::string path = "arithmetic";  // built-in sums, or a file
  std::string format = "auto";      // of the file: data::TokenLayout
  std::string held_out_path = "";   // another file to evaluate on; empty: the end of the first
  double held_out = 0.05;           // as large a share of it
  int64_t digits = 2;               // of sums
  int64_t seq_len = 0;              // 0: as long as the model takes; sums have their own length
  std::string last_batch = "drop";  // or "pad"
  int64_t prefetch = 2;             // batches that are read ahead
  bool operator==(const DataOptions&) const = default;
};

struct ParallelOptions {
  std::string mesh = "";     // axes dp (copies), fsdp (cut), tp (cut inside layers); empty: dp over all ranks
  bool fsdp = false;         // the axis dp is one of fsdp
  std::string tp_plan = "";  // a file with a plan; empty: the model's own
  bool sequence_parallel = false;
  bool loss_parallel = false;
  bool operator==(const ParallelOptions&) const = default;
};

struct TrainingOptions {
  int64_t steps = 1000;
  int64_t batch = 64;      // samples of a step, over all ranks
  int64_t accumulate = 1;  // parts that a rank's share is computed in, one after the other
  std::string precision = "fp32";
  bool activation_checkpoint = false;
  bool compile = false;
  uint64_t seed = 0;
  std::string device = "cpu";
  bool operator==(const TrainingOptions&) const = default;
};

struct OptimizerOptions {
  double lr = 1e-3;
  double beta1 = 0.9, beta2 = 0.95, eps = 1e-8;
  double weight_decay = 0.1;  // of matrices; vectors have none
  double clip = 1;            // the most the norm of all gradients may be; 0: as it is
  std::string schedule = "cosine";
  int64_t warmup = 50;       // steps
  double min_factor = 0.1;   // what the learning rate ends at, as a share of lr
  double decay_share = 0.2;  // of the steps, for schedule wsd
  bool operator==(const OptimizerOptions&) const = default;
};

struct EvalOptions {
  int64_t every = 0;           // steps; 0: at the end only
  int64_t samples = 512;       // at most
  double accuracy = 0;         // of whole answers that must be right in the end; 0: any
  int64_t sample_tokens = 64;  // of the text at the end; 0: none
  double temperature = 0;      // with which they are drawn; 0: the likeliest each time
  bool operator==(const EvalOptions&) const = default;
};

struct GuardOptions {
  std::string on_nan = "stop";  // or "skip" the update, or "ignore"
  std::string on_spike = "stop";
  double spike = 0;              // deviations from the mean of the last 128 losses that are too many; 0: no loss is
  int64_t checksum_every = 100;  // steps between comparisons of replicated parameters; 0: none
  bool operator==(const GuardOptions&) const = default;
};

struct MetricsOptions {
  std::string output = "";  // a folder; empty: nothing is written
  int64_t log_every = 10;   // steps between lines
  bool tensorboard = true;
  double peak_tflops = 0;  // of a rank's device, for MFU; 0: what is known of it
  bool operator==(const MetricsOptions&) const = default;
};

struct CheckpointOptions {
  int64_t every = 0;        // steps between checkpoints, and one at the end; 0: none
  std::string folder = "";  // that they are in, as step-N; empty: checkpoints/ in the output folder
  int64_t keep = 3;         // of them that stay; 0: all
  std::string resume = "";  // a checkpoint to go on from, or "auto": the latest in the folder, if there is one
  bool operator==(const CheckpointOptions&) const = default;
};

struct TrainConfig {
  ModelOptions model = {};
  DataOptions data = {};
  ParallelOptions parallel = {};
  TrainingOptions training = {};
  OptimizerOptions optimizer = {};
  EvalOptions eval = {};
  GuardOptions guard = {};
  MetricsOptions metrics = {};
  CheckpointOptions checkpoint = {};
  bool operator==(const TrainConfig&) const = default;
};
// TOML, a table for each part.
std::ostream& operator<<(std::ostream& out, const TrainConfig& config);

// Sets "training.steps" from "100". UsageError for a name that is none, with the nearest, and for a text that is no
// such value; the config is then as it was.
void set_option(TrainConfig& config, std::string_view key, const std::string& text);

// A value as set_option reads it; numbers as short as they can be read back.
std::string option_text(const std::string& value);
std::string option_text(bool value);
std::string option_text(int64_t value);
std::string option_text(uint64_t value);
std::string option_text(double value);

// The model's sizes: those of its name, with what was asked for in their place. UsageError as models::check.
models::Config model_config(const ModelOptions& options);
// Tokens of a sample. UsageError if the model takes fewer.
int64_t sequence_length(const TrainConfig& config);

// The mesh for so many ranks, with axes of dp, fsdp, tp in this order, where they are more than one rank or were asked
// for. Reduced precision is computed by fsdp, which then is an axis even if it is of one rank. UsageError for a mesh
// that does not have as many ranks, and for axes that are not those.
MeshShape mesh_shape(const TrainConfig& config, int64_t ranks);
// Ranks that a mesh asks for; 0: as many as there are.
int64_t ranks_of(const ParallelOptions& options);
// Of an axis; 1 if the mesh has none of that name.
int64_t extent(const MeshShape& mesh, std::string_view axis);

// Where checkpoints are; "" if neither it nor an output folder is set.
std::string checkpoint_folder(const TrainConfig& config);

// Everything that can be told without data, ranks or memory: words that are none of those allowed, numbers out of
// range, a batch that does not divide, heads that tp does not divide. UsageError for the first thing found.
void check(const TrainConfig& config, int64_t ranks);

// The plan that the layers are cut by over tp.
Plan tensor_parallel_plan(const TrainConfig& config);

}  // namespace tessera::train
