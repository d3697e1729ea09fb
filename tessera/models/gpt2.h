#pragma once
#include "tessera/models/detail/layers.h"
#include "tessera/models/detail/model_config.h"
#include "tessera/nn/attention_heads.h"
#include "tessera/nn/modules.h"
#include "tessera/pipelining/schedule.h"

// GPT-2: learned positions, pre-norm blocks, one Linear for query, key and value. Names are those of nanoGPT and
// Hugging Face (with the weight layout of nn.Linear):
//
//   wte.weight  wpe.weight  h.0.ln_1.*  h.0.attn.c_attn.*  h.0.attn.c_proj.*  h.0.ln_2.*  h.0.mlp.c_fc.*
//   h.0.mlp.c_proj.*  ...  ln_f.*             and the module lm_head, which uses wte.weight
//
// Blocks infer the number of heads from the activations, so they work on local heads and on all heads. c_attn returns
// (3, heads, head_dim) features per token. To shard it by heads, give its weight the placement SS(0,3): each rank has
// the same part of the query, key and value features.
// Example:  GPT2 model(GPT2Config{.n_layer = 4, .n_head = 4, .n_embd = 128});   auto logits = model(tokens);
namespace tessera::models {

// Causal self-attention.
struct GPT2AttentionImpl : torch::nn::Cloneable<GPT2AttentionImpl>, AttentionHeads {
  explicit GPT2AttentionImpl(const GPT2Config& config);
  void reset() override;
  at::Tensor forward(const at::Tensor& x);  // (B, T, C) -> (B, T, C)
  int64_t head_dim() const override { return config.head_dim(); }

  // The configuration, and the submodules under their names.
  GPT2Config config;
  nn::Linear c_attn{nullptr}, c_proj{nullptr};
  nn::Dropout resid_dropout{nullptr};
};
TESSERA_MODULE(GPT2Attention);  // the holder of GPT2AttentionImpl

// The feed-forward network: c_proj(gelu(c_fc(x))).
struct GPT2MLPImpl : torch::nn::Cloneable<GPT2MLPImpl> {
  explicit GPT2MLPImpl(const GPT2Config& config);
  void reset() override;
  at::Tensor forward(const at::Tensor& x);

  // The configuration, and the submodules under their names.
  GPT2Config config;
  nn::Linear c_fc{nullptr}, c_proj{nullptr};
  nn::Dropout dropout{nullptr};
};
TESSERA_MODULE(GPT2MLP);  // the holder of GPT2MLPImpl

// x + attn(ln_1(x)), then y + mlp(ln_2(y)).
struct GPT2BlockImpl : torch::nn::Cloneable<GPT2BlockImpl> {
  explicit GPT2BlockImpl(const GPT2Config& config);
  void reset() override;
  at::Tensor forward(const at::Tensor& x);

  // The configuration, and the submodules under their names.
  GPT2Config config;
  nn::LayerNorm ln_1{nullptr}, ln_2{nullptr};
  GPT2Attention attn{nullptr};
  GPT2MLP mlp{nullptr};
};
TESSERA_MODULE(GPT2Block);  // the holder of GPT2BlockImpl

// The model: tokens to logits.
struct GPT2Impl : torch::nn::Cloneable<GPT2Impl> {
  explicit GPT2Impl(const GPT2Config& config);
  void reset() override;
  // Weights are normal(0, 0.02). Layers that add to the residual stream (c_proj) use 0.02 / sqrt(2 n_layer). Biases are
  // 0, norms are 1.
  void init_weights();
  at::Tensor forward(const at::Tensor& tokens);  // (B, T), kLong -> logits (B, T, vocab)
  at::Tensor embed(const at::Tensor& tokens);    // the first step of forward: (B, T) -> (B, T, C)
  at::Tensor head(const at::Tensor& x);          // the last step of forward: (B, T, C) -> logits

  // The configuration, and the submodules under their names.
  GPT2Config config;
  nn::Embedding wte{nullptr}, wpe{nullptr};
  nn::Dropout drop{nullptr};
  nn::ModuleList<GPT2Block> h{nullptr};
  nn::LayerNorm ln_f{nullptr};
  TiedHead lm_head{nullptr};
};
TESSERA_MODULE(GPT2);  // the holder of GPT2Impl

// The model as a chain, for pipeline parallelism: "wte", "h.0", ..., "ln_f". The first and the last layer use
// wte.weight.
pipelining::PipelineLayers pipeline_layers(const GPT2& model);

}  // namespace tessera::models
