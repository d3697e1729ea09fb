#pragma once
#include "tessera/train/config.h"

// Every option once: its name in a file and as a flag, a short flag where there is one, and what it is. Command line,
// files and print-outs are made from these rows.
namespace tessera::train {

struct OptionRow {
  const char* key;         // "training.steps": --training.steps, and steps in table [training]
  const char* short_flag;  // "--steps", or ""
  const char* help;
};

// f(row, value) for each.
template <class Config, class F>
void visit_options(Config& c, F f) {
  f(OptionRow{"model.name", "--model", "A model by name, from gpt-tiny to llama-70b"}, c.model.name);
  f(OptionRow{"model.vocab_size", "", "Sizes in place of the named model's; 0: as it has them"}, c.model.vocab_size);
  f(OptionRow{"model.max_seq_len", "", "Longest sequence"}, c.model.max_seq_len);
  f(OptionRow{"model.layers", "--layers", "Blocks"}, c.model.layers);
  f(OptionRow{"model.heads", "--heads", "Attention heads"}, c.model.heads);
  f(OptionRow{"model.kv_heads", "", "Heads of keys and values, of Llama"}, c.model.kv_heads);
  f(OptionRow{"model.dim", "--dim", "Width"}, c.model.dim);
  f(OptionRow{"model.ffn_dim", "", "Width inside a feed-forward, of Llama"}, c.model.ffn_dim);
  f(OptionRow{"model.dropout", "", "Of GPT-2; below 0: as the model has it"}, c.model.dropout);

  f(OptionRow{"data.path", "--data", "arithmetic (built in), a text file, or a file of tokens"}, c.data.path);
  f(OptionRow{"data.format", "--data-format", "auto, text, llm.c, uint16 or uint32"}, c.data.format);
  f(OptionRow{"data.held_out_path", "", "A file to evaluate on; empty: the end of the first"}, c.data.held_out_path);
  f(OptionRow{"data.held_out", "", "The share of the file that is held out"}, c.data.held_out);
  f(OptionRow{"data.digits", "--digits", "Of the terms of arithmetic"}, c.data.digits);
  f(OptionRow{"data.seq_len", "--seq-len", "Tokens of a sample; 0: as many as the model takes"}, c.data.seq_len);
  f(OptionRow{"data.last_batch", "", "An uneven last batch of an epoch: drop or pad"}, c.data.last_batch);
  f(OptionRow{"data.prefetch", "", "Batches that are read ahead"}, c.data.prefetch);

  f(OptionRow{"parallel.mesh", "--mesh", "As dp=2,tp=2: axes dp, fsdp, tp. Empty: dp over all ranks"}, c.parallel.mesh);
  f(OptionRow{"parallel.fsdp", "--fsdp", "Parameters are cut over the axis dp instead of copied"}, c.parallel.fsdp);
  f(OptionRow{"parallel.tp_plan", "--tp-plan", "A file with a plan; see tessera plan --print-plan"},
    c.parallel.tp_plan);
  f(OptionRow{"parallel.sequence_parallel", "--sequence-parallel", "Activations are cut along the sequence over tp"},
    c.parallel.sequence_parallel);
  f(OptionRow{"parallel.loss_parallel", "--loss-parallel", "Logits stay cut over tp"}, c.parallel.loss_parallel);

  f(OptionRow{"training.steps", "--steps", "Steps"}, c.training.steps);
  f(OptionRow{"training.batch", "--batch", "Samples of a step, over all ranks"}, c.training.batch);
  f(OptionRow{"training.accumulate", "--accumulate", "Parts that a rank's share of a batch is computed in"},
    c.training.accumulate);
  f(OptionRow{"training.precision", "--precision", "fp32, bf16 or fp16; parameters stay fp32"}, c.training.precision);
  f(OptionRow{"training.activation_checkpoint", "--activation-checkpoint", "Blocks are computed again in backward"},
    c.training.activation_checkpoint);
  f(OptionRow{"training.compile", "--compile", "The step is traced once and runs as a program"}, c.training.compile);
  f(OptionRow{"training.seed", "--seed", "Of weights and data"}, c.training.seed);
  f(OptionRow{"training.device", "--device", "cpu or cuda"}, c.training.device);

  f(OptionRow{"optimizer.lr", "--lr", "Learning rate"}, c.optimizer.lr);
  f(OptionRow{"optimizer.beta1", "", "AdamW's"}, c.optimizer.beta1);
  f(OptionRow{"optimizer.beta2", "", "AdamW's"}, c.optimizer.beta2);
  f(OptionRow{"optimizer.eps", "", "AdamW's"}, c.optimizer.eps);
  f(OptionRow{"optimizer.weight_decay", "--weight-decay", "Of matrices; vectors have none"}, c.optimizer.weight_decay);
  f(OptionRow{"optimizer.clip", "--clip", "Largest norm of all gradients; 0: any"}, c.optimizer.clip);
  f(OptionRow{"optimizer.schedule", "--schedule", "constant, cosine, linear or wsd"}, c.optimizer.schedule);
  f(OptionRow{"optimizer.warmup", "--warmup", "Steps in which the learning rate rises"}, c.optimizer.warmup);
  f(OptionRow{"optimizer.min_factor", "", "What it ends at, as a share of lr"}, c.optimizer.min_factor);
  f(OptionRow{"optimizer.decay_share", "", "Share of the steps in which wsd goes down"}, c.optimizer.decay_share);

  f(OptionRow{"eval.every", "--eval-every", "Steps between evaluations; 0: at the end only"}, c.eval.every);
  f(OptionRow{"eval.samples", "--eval-samples", "Held-out samples, at most"}, c.eval.samples);
  f(OptionRow{"eval.accuracy", "--accuracy", "Share of answers that must be right in the end, else exit code 1"},
    c.eval.accuracy);
  f(OptionRow{"eval.sample_tokens", "--sample-tokens", "Length of the text at the end; 0: none"}, c.eval.sample_tokens);
  f(OptionRow{"eval.temperature", "--temperature", "With which it is drawn; 0: the likeliest token each time"},
    c.eval.temperature);

  f(OptionRow{"guard.on_nan", "--on-nan", "stop, skip or ignore a step whose loss or gradient is not finite"},
    c.guard.on_nan);
  f(OptionRow{"guard.on_spike", "--on-spike", "stop, skip or ignore a step whose loss is far above the last ones"},
    c.guard.on_spike);
  f(OptionRow{"guard.spike", "--spike", "Standard deviations that are far; 0: none are"}, c.guard.spike);
  f(OptionRow{"guard.checksum_every", "--checksum-every", "Steps between comparisons of replicated parameters"},
    c.guard.checksum_every);

  f(OptionRow{"metrics.output", "--output", "Folder for all that is written"}, c.metrics.output);
  f(OptionRow{"metrics.log_every", "--log-every", "Steps between lines"}, c.metrics.log_every);
  f(OptionRow{"metrics.tensorboard", "", "Event files for TensorBoard"}, c.metrics.tensorboard);
  f(OptionRow{"metrics.peak_tflops", "", "Of a rank's device, to tell the share that is used; 0: as known"},
    c.metrics.peak_tflops);

  f(OptionRow{"checkpoint.every", "--checkpoint-every", "Steps between checkpoints, and one at the end; 0: none"},
    c.checkpoint.every);
  f(OptionRow{"checkpoint.folder", "--checkpoint-folder", "For checkpoints; empty: checkpoints/ in the output folder"},
    c.checkpoint.folder);
  f(OptionRow{"checkpoint.keep", "--checkpoint-keep", "Checkpoints that stay; 0: all"}, c.checkpoint.keep);
  f(OptionRow{"checkpoint.resume", "--resume", "A checkpoint to go on from; auto: the latest, if there is one"},
    c.checkpoint.resume);
}

}  // namespace tessera::train
