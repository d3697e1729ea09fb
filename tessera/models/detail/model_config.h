#pragma once
#include <cstdint>
#include <iosfwd>

// Sizes of models, as values. No tensors here: a plan can be made from them alone.
namespace tessera::models {

struct GPT2Config {
  int64_t vocab_size = 50257, max_seq_len = 1024;
  int64_t n_layer = 12, n_head = 12, n_embd = 768;
  bool bias = true;    // of linear layers; norms always have theirs
  double dropout = 0;  // of embeddings, attention and what blocks add
  double norm_eps = 1e-5;

  int64_t head_dim() const { return n_embd / n_head; }
  bool operator==(const GPT2Config&) const = default;
};

struct LlamaConfig {
  int64_t vocab_size = 128256, max_seq_len = 8192;
  int64_t n_layers = 32, n_heads = 32, n_kv_heads = 8;  // n_heads / n_kv_heads query heads share a key and a value
  int64_t dim = 4096, ffn_dim = 14336;
  double rope_theta = 500000, norm_eps = 1e-5;
  bool tied = false;  // the output multiplies by the embedding's weight

  int64_t head_dim() const { return dim / n_heads; }
  bool operator==(const LlamaConfig&) const = default;
};

// Throw UsageError that names the fields that do not go together.
void check(const GPT2Config& config);
void check(const LlamaConfig& config);

// A shared weight counts once.
int64_t parameter_count(const GPT2Config& config);
int64_t parameter_count(const LlamaConfig& config);

std::ostream& operator<<(std::ostream& out, const GPT2Config& config);
std::ostream& operator<<(std::ostream& out, const LlamaConfig& config);

}  // namespace tessera::models
