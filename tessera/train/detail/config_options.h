#pragma once
#include "tessera/train/config.h"

// The table of all options of TrainConfig. Command line flags, TOML files and print-outs are generated from it.
namespace tessera::train {

struct OptionInfo {
  const char* key;         // "training.steps": flag --training.steps, and `steps` in the TOML table [training]
  const char* short_flag;  // "--steps", or ""
  const char* help;
};

// Calls f(info, value) for each option.
template <class Config, class F>
void visit_options(Config& c, F f) {
  f({"model.name", "--model", "Model name, from gpt-tiny to llama-70b"}, c.model.name);
  f({"model.vocab_size", "", "Vocabulary size (0: as the named model)"}, c.model.vocab_size);
  f({"model.max_seq_len", "", "Maximum sequence length (0: as the named model)"}, c.model.max_seq_len);
  f({"model.layers", "--layers", "Number of transformer blocks (0: as the named model)"}, c.model.layers);
  f({"model.heads", "--heads", "Number of attention heads (0: as the named model)"}, c.model.heads);
  f({"model.kv_heads", "", "Number of key/value heads of Llama (0: as the named model)"}, c.model.kv_heads);
  f({"model.dim", "--dim", "Embedding dimension (0: as the named model)"}, c.model.dim);
  f({"model.ffn_dim", "", "Hidden dimension of the feed-forward layer of Llama (0: as the named model)"},
    c.model.ffn_dim);
  f({"model.dropout", "", "Dropout probability of GPT-2 (negative: as the named model)"}, c.model.dropout);

  f({"data.path", "--data", "Training data: arithmetic (built in), a text file, or a file of tokens"}, c.data.path);
  f({"data.format", "--data-format", "Format of the data file: auto, text, llm.c, uint16 or uint32"}, c.data.format);
  f({"data.validation_path", "", "Validation data file (empty: the end of the training file)"}, c.data.validation_path);
  f({"data.validation_fraction", "", "Fraction of the training file used for validation"}, c.data.validation_fraction);
  f({"data.digits", "--digits", "Digits of the numbers in arithmetic"}, c.data.digits);
  f({"data.seq_len", "--seq-len", "Tokens per sample (0: the model's maximum)"}, c.data.seq_len);
  f({"data.last_batch", "", "Incomplete last batch of an epoch: drop or pad"}, c.data.last_batch);
  f({"data.prefetch", "", "Number of batches to read ahead"}, c.data.prefetch);

  f({"parallel.mesh", "--mesh",
     "Mesh axes and sizes, as in dp=2,tp=2; axes are dp, fsdp, tp (empty: dp over all ranks)"},
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

  f({"training.steps", "--steps", "Number of training steps"}, c.training.steps);
  f({"training.batch", "--batch", "Global batch size in samples"}, c.training.batch);
  f({"training.accumulate", "--accumulate", "Gradient accumulation steps"}, c.training.accumulate);
  f({"training.precision", "--precision", "Compute precision: fp32, bf16 or fp16; parameters stay fp32"},
    c.training.precision);
  f({"training.activation_checkpoint", "--activation-checkpoint", "Recompute each block in backward to save memory"},
    c.training.activation_checkpoint);
  f({"training.compile", "--compile", "Compile the training step"}, c.training.compile);
  f({"training.seed", "--seed", "Random seed of weights and data order"}, c.training.seed);
  f({"training.device", "--device", "Device: cpu or cuda"}, c.training.device);

  f({"optimizer.lr", "--lr", "Peak learning rate"}, c.optimizer.lr);
  f({"optimizer.beta1", "", "AdamW beta1"}, c.optimizer.beta1);
  f({"optimizer.beta2", "", "AdamW beta2"}, c.optimizer.beta2);
  f({"optimizer.eps", "", "AdamW epsilon"}, c.optimizer.eps);
  f({"optimizer.weight_decay", "--weight-decay", "AdamW weight decay of matrices; vectors have none"},
    c.optimizer.weight_decay);
  f({"optimizer.clip", "--clip", "Maximum gradient norm (0: no clipping)"}, c.optimizer.clip);
  f({"optimizer.schedule", "--schedule", "Learning rate schedule: constant, cosine, linear or wsd"},
    c.optimizer.schedule);
  f({"optimizer.warmup", "--warmup", "Learning rate warmup steps"}, c.optimizer.warmup);
  f({"optimizer.min_factor", "", "Final learning rate as a fraction of lr"}, c.optimizer.min_factor);
  f({"optimizer.decay_share", "", "Fraction of the steps in the decay phase of wsd"}, c.optimizer.decay_share);

  f({"eval.every", "--eval-every", "Steps between validations (0: only at the end)"}, c.eval.every);
  f({"eval.samples", "--eval-samples", "Maximum number of validation samples"}, c.eval.samples);
  f({"eval.accuracy", "--accuracy",
     "Required validation accuracy at the end, 0 to 1; below it the exit code is 1 (0: off)"},
    c.eval.accuracy);
  f({"eval.sample_tokens", "--sample-tokens", "Tokens of the text generated at the end (0: none)"},
    c.eval.sample_tokens);
  f({"eval.temperature", "--temperature", "Sampling temperature of the generated text (0: greedy)"},
    c.eval.temperature);

  f({"guard.on_nan", "--on-nan", "If loss or gradient norm is not finite: stop, skip or ignore the step"},
    c.guard.on_nan);
  f({"guard.on_spike", "--on-spike", "On a loss spike: stop, skip or ignore the step"}, c.guard.on_spike);
  f({"guard.spike", "--spike", "Loss-spike threshold in standard deviations (0: off)"}, c.guard.spike);
  f({"guard.checksum_every", "--checksum-every",
     "Steps between checks that replicated parameters are equal on all ranks (0: off)"},
    c.guard.checksum_every);

  f({"metrics.output", "--output", "Output folder (empty: outputs/<time>-<model>)"}, c.metrics.output);
  f({"metrics.log_every", "--log-every", "Steps between log lines"}, c.metrics.log_every);
  f({"metrics.tensorboard", "", "Write TensorBoard event files"}, c.metrics.tensorboard);
  f({"metrics.peak_tflops", "", "Peak TFLOPS of a rank's device, for MFU (0: looked up by device name)"},
    c.metrics.peak_tflops);

  f({"checkpoint.every", "--checkpoint-every", "Steps between checkpoints, plus one at the end (0: none)"},
    c.checkpoint.every);
  f({"checkpoint.folder", "--checkpoint-folder", "Checkpoint folder (empty: checkpoints/ in the output folder)"},
    c.checkpoint.folder);
  f({"checkpoint.keep", "--checkpoint-keep", "Number of checkpoints to keep (0: all)"}, c.checkpoint.keep);
  f({"checkpoint.resume", "--resume", "Checkpoint to resume from; auto: the latest one, if any"}, c.checkpoint.resume);
}

}  // namespace tessera::train
