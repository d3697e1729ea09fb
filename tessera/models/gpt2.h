#pragma once
#include "tessera/models/detail/model_config.h"
#include "tessera/models/detail/tied_head.h"
#include "tessera/nn/attention_heads.h"
#include "tessera/nn/detail/module_list.h"
#include "tessera/nn/modules.h"

// GPT-2: learned positions, norms before each part, one matrix for query, key and value. Names are those of nanoGPT and
// Hugging Face (weights as nn.Linear has them):
//
//   wte.weight  wpe.weight  h.0.ln_1.*  h.0.attn.c_attn.*  h.0.attn.c_proj.*  h.0.ln_2.*  h.0.mlp.c_fc.*
//   h.0.mlp.c_proj.*  ...  ln_f.*             and the module lm_head, which multiplies by wte.weight
//
// How many heads there are is read off the activations, so blocks work on a rank's own heads as on all of them. c_attn
// gives (3, heads, head_dim) numbers a token. To cut it by heads, cut its weight as SS(0,3): a part of the query rows,
// the same part of the key rows, the same part of the value rows.
namespace tessera::models {

struct GPT2AttentionImpl : torch::nn::Cloneable<GPT2AttentionImpl>, AttentionHeads {
  explicit GPT2AttentionImpl(const GPT2Config& config);
  void reset() override;
  at::Tensor forward(const at::Tensor& x);  // (B, T, C) -> (B, T, C)
  int64_t head_dim() const override { return config.head_dim(); }

  GPT2Config config;
  nn::Linear c_attn{nullptr}, c_proj{nullptr};
  nn::Dropout resid_dropout{nullptr};
};
TESSERA_MODULE(GPT2Attention);

struct GPT2MLPImpl : torch::nn::Cloneable<GPT2MLPImpl> {
  explicit GPT2MLPImpl(const GPT2Config& config);
  void reset() override;
  at::Tensor forward(const at::Tensor& x);

  GPT2Config config;
  nn::Linear c_fc{nullptr}, c_proj{nullptr};
  nn::Dropout dropout{nullptr};
};
TESSERA_MODULE(GPT2MLP);

struct GPT2BlockImpl : torch::nn::Cloneable<GPT2BlockImpl> {
  explicit GPT2BlockImpl(const GPT2Config& config);
  void reset() override;
  at::Tensor forward(const at::Tensor& x);

  GPT2Config config;
  nn::LayerNorm ln_1{nullptr}, ln_2{nullptr};
  GPT2Attention attn{nullptr};
  GPT2MLP mlp{nullptr};
};
TESSERA_MODULE(GPT2Block);

struct GPT2Impl : torch::nn::Cloneable<GPT2Impl> {
  explicit GPT2Impl(const GPT2Config& config);
  void reset() override;
  // Weights normal(0, 0.02), those that add to the stream (c_proj) by 1 / sqrt(2 n_layer) less; biases 0, norms 1.
  void init_weights();
  at::Tensor forward(const at::Tensor& tokens);  // (B, T) of kLong -> logits (B, T, vocab)

  GPT2Config config;
  nn::Embedding wte{nullptr}, wpe{nullptr};
  nn::Dropout drop{nullptr};
  nn::ModuleList<GPT2Block> h{nullptr};
  nn::LayerNorm ln_f{nullptr};
  TiedHead lm_head{nullptr};
};
TESSERA_MODULE(GPT2);

}  // namespace tessera::models
