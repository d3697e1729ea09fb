#pragma once
#include "tessera/models/detail/layers.h"
#include "tessera/models/detail/model_config.h"
#include "tessera/models/detail/moe.h"
#include "tessera/nn/attention_heads.h"
#include "tessera/nn/modules.h"
#include "tessera/pipelining/schedule.h"

// Llama: rotary position embeddings, RMSNorm, grouped-query attention, SwiGLU, no biases. Names are those of Meta and
// torchtitan:
//
//   tok_embeddings.weight  layers.0.attention.{wq,wk,wv,wo}.weight  layers.0.feed_forward.{w1,w2,w3}.weight
//   layers.0.attention_norm.weight  layers.0.ffn_norm.weight  ...  norm.weight  output.weight (absent if tied)
//
// With experts (Mixtral), layers.0.moe.{gate.weight,w1,w2,w3} take the place of layers.0.feed_forward.
// Layers infer the number of heads from the activations, so they work on local heads and on all heads.
// Example:  Llama model(std::get<LlamaConfig>(find_config("llama-1b")));   auto logits = model(tokens);
namespace tessera::models {

// Causal self-attention with grouped queries and rotary positions.
struct LlamaAttentionImpl : torch::nn::Cloneable<LlamaAttentionImpl>, AttentionHeads {
  explicit LlamaAttentionImpl(const LlamaConfig& config);
  void reset() override;
  at::Tensor forward(const at::Tensor& x, const at::Tensor& rope);  // (B, T, C), rope_table -> (B, T, C)
  int64_t head_dim() const override { return config.head_dim(); }

  // The configuration, and the submodules under their names.
  LlamaConfig config;
  nn::Linear wq{nullptr}, wk{nullptr}, wv{nullptr}, wo{nullptr};
};
TESSERA_MODULE(LlamaAttention);  // the holder of LlamaAttentionImpl

// The SwiGLU feed-forward network.
struct LlamaFeedForwardImpl : torch::nn::Cloneable<LlamaFeedForwardImpl> {
  explicit LlamaFeedForwardImpl(const LlamaConfig& config);
  void reset() override;
  at::Tensor forward(const at::Tensor& x);  // w2(silu(w1(x)) * w3(x))

  // The configuration, and the submodules under their names.
  LlamaConfig config;
  nn::Linear w1{nullptr}, w2{nullptr}, w3{nullptr};
};
TESSERA_MODULE(LlamaFeedForward);  // the holder of LlamaFeedForwardImpl

// x + attention(attention_norm(x)), then y + feed_forward(ffn_norm(y)).
struct LlamaBlockImpl : torch::nn::Cloneable<LlamaBlockImpl> {
  explicit LlamaBlockImpl(const LlamaConfig& config);
  void reset() override;
  at::Tensor forward(const at::Tensor& x, const at::Tensor& rope);

  // The configuration, and the submodules under their names.
  LlamaConfig config;
  LlamaAttention attention{nullptr};
  LlamaFeedForward feed_forward{nullptr};  // null with experts
  MoE moe{nullptr};                        // null without experts
  nn::RMSNorm attention_norm{nullptr}, ffn_norm{nullptr};
};
TESSERA_MODULE(LlamaBlock);  // the holder of LlamaBlockImpl

// The model: tokens to logits.
struct LlamaImpl : torch::nn::Cloneable<LlamaImpl> {
  explicit LlamaImpl(const LlamaConfig& config);
  void reset() override;
  // Weights are normal(0, 0.02). Layers that add to the residual stream (wo, w2) use 0.02 / sqrt(2 n_layers). Norms are
  // 1.
  void init_weights();
  at::Tensor forward(const at::Tensor& tokens);       // (B, T), kLong -> logits (B, T, vocab)
  at::Tensor embed(const at::Tensor& tokens);         // the first step of forward: (B, T) -> (B, T, C)
  at::Tensor rope(const at::Tensor& embedded) const;  // the rotary angles of (B, T, C) activations
  at::Tensor head(const at::Tensor& x);               // the last step of forward: (B, T, C) -> logits

  // The configuration, and the submodules under their names.
  LlamaConfig config;
  nn::Embedding tok_embeddings{nullptr};
  nn::ModuleList<LlamaBlock> layers{nullptr};
  nn::RMSNorm norm{nullptr};
  nn::Linear output{nullptr};     // null if tied
  TiedHead tied_output{nullptr};  // null if not tied; its module name is "output" too
};
TESSERA_MODULE(Llama);  // the holder of LlamaImpl

// The model as a chain, for pipeline parallelism: "tok_embeddings", "layers.0", ..., "norm". With a tied output, the
// first and the last layer use tok_embeddings.weight.
pipelining::PipelineLayers pipeline_layers(const Llama& model);

// Expert parallelism: divides the experts of each layer among the ranks of a 1-D mesh, in place. Tokens travel to their
// experts and back: 3 all_to_all per layer in forward (the numbers of tokens, the tokens, the results), 2 in backward.
// The ranks of the mesh have different tokens. The gradient of an expert is the sum over all of them.
// Throws UsageError if the model has no experts or their number is not divisible; then nothing has changed.
// Example:  expert_parallel(model, mesh["ep"]);
void expert_parallel(const Llama& model, const DeviceMesh& mesh);
// Router statistics of each layer since the last update_expert_bias(), over the tokens of this rank.
std::vector<RouterStatistics> router_statistics(const Llama& model);
// Once per step: moves the biases that balance the experts, and resets the statistics. With `group`, the choices of all
// its ranks count, and the biases stay equal.
void update_expert_bias(const Llama& model, const comm::Group& group = {});

}  // namespace tessera::models
