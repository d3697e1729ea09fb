#include "tessera/models/sizes.h"

#include "tessera/base/detail/nearest_names.h"
#include "tessera/base/error.h"

namespace tessera::models {

// The published sizes. Llama 3 models use the original rotary frequencies, without the scaling for long contexts of
// Llama 3.1 and later. The tiny models are Tessera's own: they use bytes as tokens and train quickly on two cores.
const std::vector<Size>& all_sizes() {
  static const std::vector<Size> sizes{
      {"gpt-tiny", GPT2Config{.vocab_size = 256, .max_seq_len = 256, .n_layer = 4, .n_head = 4, .n_embd = 128}},
      {"gpt2-124m", GPT2Config{.n_layer = 12, .n_head = 12, .n_embd = 768}},
      {"gpt2-350m", GPT2Config{.n_layer = 24, .n_head = 16, .n_embd = 1024}},
      {"gpt2-774m", GPT2Config{.n_layer = 36, .n_head = 20, .n_embd = 1280}},
      {"gpt2-1558m", GPT2Config{.n_layer = 48, .n_head = 25, .n_embd = 1600}},
      {"llama-tiny", LlamaConfig{.vocab_size = 256,
                                 .max_seq_len = 256,
                                 .n_layers = 4,
                                 .n_heads = 4,
                                 .n_kv_heads = 2,
                                 .dim = 128,
                                 .ffn_dim = 384,
                                 .rope_theta = 10000}},
      {"mixtral-tiny", LlamaConfig{.vocab_size = 256,
                                   .max_seq_len = 256,
                                   .n_layers = 4,
                                   .n_heads = 4,
                                   .n_kv_heads = 2,
                                   .dim = 128,
                                   .ffn_dim = 192,
                                   .rope_theta = 10000,
                                   .moe = {.n_experts = 8}}},
      {"deepseek-tiny", LlamaConfig{.vocab_size = 256,
                                    .max_seq_len = 256,
                                    .n_layers = 4,
                                    .n_heads = 4,
                                    .n_kv_heads = 4,
                                    .dim = 128,
                                    .ffn_dim = 96,
                                    .rope_theta = 10000,
                                    .moe = {.n_experts = 16,
                                            .top_k = 4,
                                            .n_shared_experts = 1,
                                            .aux_loss_weight = 0,
                                            .bias_update_rate = 0.001}}},
      {"llama-1b",
       LlamaConfig{.n_layers = 16, .n_heads = 32, .n_kv_heads = 8, .dim = 2048, .ffn_dim = 8192, .tied = true}},
      {"llama-3b",
       LlamaConfig{.n_layers = 28, .n_heads = 24, .n_kv_heads = 8, .dim = 3072, .ffn_dim = 8192, .tied = true}},
      {"llama-8b", LlamaConfig{.n_layers = 32, .n_heads = 32, .n_kv_heads = 8, .dim = 4096, .ffn_dim = 14336}},
      {"llama-70b", LlamaConfig{.n_layers = 80, .n_heads = 64, .n_kv_heads = 8, .dim = 8192, .ffn_dim = 28672}},
      {"mixtral-8x7b", LlamaConfig{.vocab_size = 32000,
                                   .max_seq_len = 32768,
                                   .n_layers = 32,
                                   .n_heads = 32,
                                   .n_kv_heads = 8,
                                   .dim = 4096,
                                   .ffn_dim = 14336,
                                   .rope_theta = 1000000,
                                   .moe = {.n_experts = 8}}},
  };
  return sizes;
}

const Config& find_config(const std::string& name) {
  std::vector<std::string> names;
  for (const auto& size : all_sizes()) {
    if (name == size.name) return size.config;
    names.emplace_back(size.name);
  }
  const auto near = did_you_mean(name, names);
  std::string all;
  for (const auto& known : names) all += (all.empty() ? "" : ", ") + known;
  TESSERA_FAIL(UsageError, "unknown model '", name, "'; ", near.empty() ? "models are: " + all : near);
}

int64_t parameter_count(const Config& config) {
  return std::visit([](const auto& c) { return parameter_count(c); }, config);
}

}  // namespace tessera::models
