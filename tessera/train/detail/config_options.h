#pragma once
#include "tessera/train/config.h"

#include <iosfwd>
#include <optional>

// The table of all options of TrainConfig. Command line flags, TOML files and print-outs are generated from it.
namespace tessera::train {

// The values that a number may have. Prints as "from 0 to 10", "above 0 and at most 1".
struct OptionRange {
  double min, max;
  bool above_min = false, below_max = false;  // the bound itself is not allowed

  bool contains(double value) const {  // false for NaN
    return (above_min ? value > min : value >= min) && (below_max ? value < max : value <= max);
  }
};
std::ostream& operator<<(std::ostream& out, const OptionRange& range);

struct OptionInfo {
  const char* key;         // "training.steps": flag --training.steps, and `steps` in the TOML table [training]
  const char* short_flag;  // "--steps", or ""
  const char* help;
  std::optional<OptionRange> range = {};  // of a number
};

// Bounds that keep products of sizes within 63 bits, and every check fast.
constexpr OptionRange kSteps{1, 1e9}, kStepsOrOff{0, 1e9}, kFraction{0, 1}, kStagesOrAuto{0, 10000};
constexpr int64_t kMaxRanks = 1 << 17;

// Calls f(info, value) for each option.
template <class Config, class F>
void visit_options(Config& c, F f) {
  f({"model.name", "--model", "Model name, from gpt-tiny to llama-70b"}, c.model.name);
  f({"model.vocab_size", "", "Vocabulary size (0: as the named model)", {{0, 1 << 24}}}, c.model.vocab_size);
  f({"model.max_seq_len", "", "Maximum sequence length (0: as the named model)", {{0, 1 << 24}}}, c.model.max_seq_len);
  f({"model.layers", "--layers", "Number of transformer blocks (0: as the named model)", {{0, 10000}}}, c.model.layers);
  f({"model.heads", "--heads", "Number of attention heads (0: as the named model)", {{0, 65536}}}, c.model.heads);
  f({"model.kv_heads", "", "Number of key/value heads of Llama (0: as the named model)", {{0, 65536}}},
    c.model.kv_heads);
  f({"model.dim", "--dim", "Embedding dimension (0: as the named model)", {{0, 1 << 20}}}, c.model.dim);
  f({"model.ffn_dim",
     "",
     "Hidden dimension of the feed-forward layer of Llama (0: as the named model)",
     {{0, 1 << 22}}},
    c.model.ffn_dim);
  f({"model.dropout", "", "Dropout probability of GPT-2 (negative: as the named model)", {{-1, 1, false, true}}},
    c.model.dropout);
  f({"model.experts", "--experts", "Number of experts of Llama (0: as the named model)", {{0, 65536}}},
    c.model.experts);
  f({"model.top_k", "", "Experts per token (0: as the named model)", {{0, 65536}}}, c.model.top_k);
  f({"model.shared_experts", "", "Experts that every token uses (-1: as the named model)", {{-1, 65536}}},
    c.model.shared_experts);
  f({"model.capacity_factor", "", "Capacity of an expert (0: dropless; negative: as the named model)", {{-1, 1e6}}},
    c.model.capacity_factor);
  f({"model.aux_loss_weight",
     "",
     "Weight of the loss that balances the experts (negative: as the named model)",
     {{-1, 1e6}}},
    c.model.aux_loss_weight);
  f({"model.bias_update_rate",
     "",
     "Update rate of the bias that balances the experts (negative: as the named model)",
     {{-1, 1e6}}},
    c.model.bias_update_rate);

  f({"data.path", "--data", "Training data: arithmetic (built in), a text file, or a file of tokens"}, c.data.path);
  f({"data.format", "--data-format", "Format of the data file: auto, text, llm.c, uint16 or uint32"}, c.data.format);
  f({"data.validation_path", "", "Validation data file (empty: the end of the training file)"}, c.data.validation_path);
  f({"data.validation_fraction", "", "Fraction of the training file used for validation", {{0, 1, true, true}}},
    c.data.validation_fraction);
  f({"data.digits", "--digits", "Digits of the numbers in arithmetic", {{1, 8}}}, c.data.digits);
  f({"data.seq_len", "--seq-len", "Tokens per sample (0: the model's maximum)", {{0, 1 << 24}}}, c.data.seq_len);
  f({"data.last_batch", "", "Incomplete last batch of an epoch: drop or pad"}, c.data.last_batch);
  f({"data.prefetch", "", "Number of batches to read ahead", {{1, 1024}}}, c.data.prefetch);

  f({"parallel.mesh", "--mesh",
     "Mesh axes and sizes, as in pp=2,dp=2,tp=2; axes are pp, dp, fsdp, cp, tp, and ep inside dp, fsdp and cp (empty: "
     "dp over all ranks)"},
    c.parallel.mesh);
  f({"parallel.fsdp", "--fsdp", "Shard parameters over the axis dp (FSDP) instead of replicating them"},
    c.parallel.fsdp);
  f({"parallel.tp_plan", "--tp-plan",
     "File with a tensor-parallel plan, see tessera plan --print-plan (empty: the model's plan)"},
    c.parallel.tp_plan);
  f({"parallel.sequence_parallel", "--sequence-parallel", "Shard activations along the sequence over tp"},
    c.parallel.sequence_parallel);
  f({"parallel.loss_parallel", "--loss-parallel", "Compute the loss on logits sharded over tp"},
    c.parallel.loss_parallel);
  f({"parallel.pipeline_schedule", "--pipeline-schedule",
     "Pipeline schedule: GPipe, 1F1B, Interleaved1F1B, LoopedBFS, InterleavedZeroBubble, ZBVZeroBubble or DualPipeV"},
    c.parallel.pipeline_schedule);
  f({"parallel.pipeline_stages", "--pipeline-stages",
     "Pipeline stages of the model (0: one per rank of pp for GPipe and 1F1B, otherwise two)", kStagesOrAuto},
    c.parallel.pipeline_stages);
  f({"parallel.microbatches",
     "--microbatches",
     "Microbatches of a pipeline step (0: the largest divisor of a rank's rows up to 2 x pp)",
     {{0, 1 << 20}}},
    c.parallel.microbatches);
  f({"parallel.context_method", "--context-method", "Context parallelism: ring or ulysses"}, c.parallel.context_method);
  f({"parallel.context_rotate", "--context-rotate", "How a ring moves keys and values: allgather or alltoall"},
    c.parallel.context_rotate);

  f({"training.steps", "--steps", "Number of training steps", kSteps}, c.training.steps);
  f({"training.batch", "--batch", "Global batch size in samples", {{1, 1 << 24}}}, c.training.batch);
  f({"training.accumulate", "--accumulate", "Gradient accumulation steps", {{1, 1 << 24}}}, c.training.accumulate);
  f({"training.precision", "--precision", "Compute precision: fp32, bf16 or fp16; parameters stay fp32"},
    c.training.precision);
  f({"training.activation_checkpoint", "--activation-checkpoint", "Recompute each block in backward to save memory"},
    c.training.activation_checkpoint);
  f({"training.compile", "--compile", "Compile the training step"}, c.training.compile);
  f({"training.numerics", "--numerics",
     "default, or invariant: losses and weights have the same bits on every mesh, with any --accumulate"},
    c.training.numerics);
  f({"training.virtual_shards",
     "--virtual-shards",
     "Virtual shards of a batch under invariant numerics; the data-parallel ranks divide them, and they the batch",
     {{1, 1 << 20}}},
    c.training.virtual_shards);
  f({"training.seed", "--seed", "Random seed of weights and data order"}, c.training.seed);
  f({"training.device", "--device", "Device: cpu or cuda"}, c.training.device);

  f({"optimizer.lr", "--lr", "Peak learning rate", {{0, 1e6}}}, c.optimizer.lr);
  f({"optimizer.beta1", "", "AdamW beta1", {{0, 1, false, true}}}, c.optimizer.beta1);
  f({"optimizer.beta2", "", "AdamW beta2", {{0, 1, false, true}}}, c.optimizer.beta2);
  f({"optimizer.eps", "", "AdamW epsilon", {{0, 1}}}, c.optimizer.eps);
  f({"optimizer.weight_decay", "--weight-decay", "AdamW weight decay of matrices; vectors have none", {{0, 1e6}}},
    c.optimizer.weight_decay);
  f({"optimizer.clip", "--clip", "Maximum gradient norm (0: no clipping)", {{0, 1e9}}}, c.optimizer.clip);
  f({"optimizer.schedule", "--schedule", "Learning rate schedule: constant, cosine, linear or wsd"},
    c.optimizer.schedule);
  f({"optimizer.warmup", "--warmup", "Learning rate warmup steps", kStepsOrOff}, c.optimizer.warmup);
  f({"optimizer.min_factor", "", "Final learning rate as a fraction of lr", kFraction}, c.optimizer.min_factor);
  f({"optimizer.decay_share", "", "Fraction of the steps in the decay phase of wsd", {{0, 1, true}}},
    c.optimizer.decay_share);

  f({"eval.every", "--eval-every", "Steps between validations (0: only at the end)", kStepsOrOff}, c.eval.every);
  f({"eval.samples", "--eval-samples", "Maximum number of validation samples", kSteps}, c.eval.samples);
  f({"eval.accuracy", "--accuracy",
     "Required validation accuracy at the end, 0 to 1; below it the exit code is 1 (0: off)", kFraction},
    c.eval.accuracy);
  f({"eval.sample_tokens", "--sample-tokens", "Tokens of the text generated at the end (0: none)", {{0, 1 << 20}}},
    c.eval.sample_tokens);
  f({"eval.temperature",
     "--temperature",
     "Sampling temperature of the generated text (0: greedy; negative: 0 for arithmetic, 0.8 for text)",
     {{-1, 1000}}},
    c.eval.temperature);

  f({"guard.on_nan", "--on-nan", "If loss or gradient norm is not finite: stop, skip or ignore the step"},
    c.guard.on_nan);
  f({"guard.on_spike", "--on-spike", "On a loss spike: stop, skip or ignore the step"}, c.guard.on_spike);
  f({"guard.spike", "--spike", "Loss-spike threshold in standard deviations (0: off)", {{0, 1e9}}}, c.guard.spike);
  f({"guard.checksum_every", "--checksum-every",
     "Steps between checks that replicated parameters are equal on all ranks (0: off)", kStepsOrOff},
    c.guard.checksum_every);

  f({"metrics.output", "--output", "Output folder (empty: outputs/<time>-<model>)"}, c.metrics.output);
  f({"metrics.log_every", "--log-every", "Steps between log lines", kSteps}, c.metrics.log_every);
  f({"metrics.tensorboard", "", "Write TensorBoard event files"}, c.metrics.tensorboard);
  f({"metrics.histograms_every", "", "Steps between histograms of weights and gradients in TensorBoard (0: none)",
     kStepsOrOff},
    c.metrics.histograms_every);
  f({"metrics.profile_step", "--profile-step",
     "Step since the start of the run that the report shows in detail: ops, collectives, memory (0: none)",
     kStepsOrOff},
    c.metrics.profile_step);
  f({"metrics.compare_numerics", "--compare-numerics",
     "Before the run, train this many steps with default and with invariant numerics, and print the distance (0: none)",
     kStepsOrOff},
    c.metrics.compare_numerics);
  f({"metrics.peak_tflops", "", "Peak TFLOPS of a rank's device, for MFU (0: looked up by device name)", {{0, 1e9}}},
    c.metrics.peak_tflops);

  f({"checkpoint.every", "--checkpoint-every", "Steps between checkpoints, plus one at the end (0: none)", kStepsOrOff},
    c.checkpoint.every);
  f({"checkpoint.folder", "--checkpoint-folder", "Checkpoint folder (empty: checkpoints/ in the output folder)"},
    c.checkpoint.folder);
  f({"checkpoint.keep", "--checkpoint-keep", "Number of checkpoints to keep (0: all)", kStepsOrOff}, c.checkpoint.keep);
  f({"checkpoint.async", "--checkpoint-async", "Write checkpoints in the background while training goes on"},
    c.checkpoint.async);
  f({"checkpoint.resume", "--resume", "Checkpoint to resume from; auto: the latest one, if any"}, c.checkpoint.resume);
}

}  // namespace tessera::train
