#pragma once
#include "tessera/models/detail/model_config.h"
#include "tessera/models/detail/tied_head.h"
#include "tessera/nn/attention_heads.h"
#include "tessera/nn/detail/module_list.h"
#include "tessera/nn/modules.h"
#include "tessera/nn/detail/rms_norm.h"

// Llama: rotary positions, RMS norms, grouped-query attention, SwiGLU, no biases. Names are those of Meta and
// torchtitan:
//
//   tok_embeddings.weight  layers.0.attention.{wq,wk,wv,wo}.weight  layers.0.feed_forward.{w1,w2,w3}.weight
//   layers.0.attention_norm.weight  layers.0.ffn_norm.weight  ...  norm.weight  output.weight (none if tied)
//
// How many heads there are is read off the activations, so layers work on a rank's own heads as on all of them.
namespace tessera::models {

struct LlamaAttentionImpl : torch::nn::Cloneable<LlamaAttentionImpl>, AttentionHeads {
  explicit LlamaAttentionImpl(const LlamaConfig& config);
  void reset() override;
  at::Tensor forward(const at::Tensor& x, const at::Tensor& rope);  // (B, T, C), rope_table -> (B, T, C)
  int64_t head_dim() const override { return config.head_dim(); }

  LlamaConfig config;
  nn::Linear wq{nullptr}, wk{nullptr}, wv{nullptr}, wo{nullptr};
};
TESSERA_MODULE(LlamaAttention);

struct LlamaFeedForwardImpl : torch::nn::Cloneable<LlamaFeedForwardImpl> {
  explicit LlamaFeedForwardImpl(const LlamaConfig& config);
  void reset() override;
  at::Tensor forward(const at::Tensor& x);  // w2(silu(w1(x)) * w3(x))

  LlamaConfig config;
  nn::Linear w1{nullptr}, w2{nullptr}, w3{nullptr};
};
TESSERA_MODULE(LlamaFeedForward);

struct LlamaBlockImpl : torch::nn::Cloneable<LlamaBlockImpl> {
  explicit LlamaBlockImpl(const LlamaConfig& config);
  void reset() override;
  at::Tensor forward(const at::Tensor& x, const at::Tensor& rope);

  LlamaConfig config;
  LlamaAttention attention{nullptr};
  LlamaFeedForward feed_forward{nullptr};
  nn::RMSNorm attention_norm{nullptr}, ffn_norm{nullptr};
};
TESSERA_MODULE(LlamaBlock);

struct LlamaImpl : torch::nn::Cloneable<LlamaImpl> {
  explicit LlamaImpl(const LlamaConfig& config);
  void reset() override;
  // Weights normal(0, 0.02), those that add to the stream (wo, w2) by 1 / sqrt(2 n_layers) less; norms 1.
  void init_weights();
  at::Tensor forward(const at::Tensor& tokens);  // (B, T) of kLong -> logits (B, T, vocab)

  LlamaConfig config;
  nn::Embedding tok_embeddings{nullptr};
  nn::ModuleList<LlamaBlock> layers{nullptr};
  nn::RMSNorm norm{nullptr};
  nn::Linear output{nullptr};     // null if tied
  TiedHead tied_output{nullptr};  // the module "output" if tied, else null
};
TESSERA_MODULE(Llama);

}  // namespace tessera::models
