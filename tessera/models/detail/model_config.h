#pragma once
#include <cstdint>
#include <iosfwd>

// The configurations of the models, as plain values without tensors.
namespace tessera::models {

// The sizes of a GPT-2, with the names of nanoGPT.
struct GPT2Config {
  int64_t vocab_size = 50257, max_seq_len = 1024;
  int64_t n_layer = 12, n_head = 12, n_embd = 768;
  bool bias = true;    // of Linear layers; norms always have a bias
  double dropout = 0;  // of embeddings, attention and residual branches
  double norm_eps = 1e-5;

  int64_t head_dim() const { return n_embd / n_head; }
  bool operator==(const GPT2Config&) const = default;
};

// A mixture of experts in place of each feed-forward network. The defaults are those of Mixtral.
struct MoEConfig {
  int64_t n_experts = 0;         // 0: one dense feed-forward network
  int64_t top_k = 2;             // experts per token
  int64_t n_shared_experts = 0;  // experts that every token uses (DeepSeek)
  // An expert takes at most capacity_factor * tokens * top_k / n_experts of the tokens of a rank; the rest is dropped.
  // 0: dropless.
  double capacity_factor = 0;
  double aux_loss_weight = 0.01;  // of the loss that balances the experts (Switch Transformer); 0: none
  double bias_update_rate = 0;    // of a bias that balances the choice without a loss (DeepSeek-V3); 0: no bias

  bool operator==(const MoEConfig&) const = default;
};

// The sizes of a Llama, with the names of torchtitan.
struct LlamaConfig {
  int64_t vocab_size = 128256, max_seq_len = 8192;
  int64_t n_layers = 32, n_heads = 32, n_kv_heads = 8;  // n_heads / n_kv_heads query heads share a key and value head
  int64_t dim = 4096, ffn_dim = 14336;
  double rope_theta = 500000, norm_eps = 1e-5;
  bool tied = false;   // the output layer uses the weight of the embedding
  MoEConfig moe = {};  // with experts: ffn_dim is the width of one expert

  int64_t head_dim() const { return dim / n_heads; }
  bool operator==(const LlamaConfig&) const = default;
};

// Throws UsageError with the names of the fields that are invalid or do not fit.
void check(const GPT2Config& config);
void check(const LlamaConfig& config);

// The number of parameters. A shared weight counts once.
int64_t parameter_count(const GPT2Config& config);
int64_t parameter_count(const LlamaConfig& config);

// Prints the fields.
std::ostream& operator<<(std::ostream& out, const GPT2Config& config);
std::ostream& operator<<(std::ostream& out, const LlamaConfig& config);

}  // namespace tessera::models
