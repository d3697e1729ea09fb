#include "tessera/models/gpt2.h"

#include "tessera/base/error.h"
#include "tessera/models/detail/replicate_like.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <torch/nn/init.h>

#include <cmath>

namespace tessera::models {
namespace {

torch::nn::LinearOptions linear(int64_t in, int64_t out, const GPT2Config& config) {
  return torch::nn::LinearOptions(in, out).bias(config.bias);
}

nn::LayerNorm layer_norm(const GPT2Config& config) {
  nn::LayerNorm norm(torch::nn::LayerNormOptions({config.n_embd}).eps(config.norm_eps));
  return norm;
}

}  // namespace

GPT2AttentionImpl::GPT2AttentionImpl(const GPT2Config& config) : config(config) { GPT2AttentionImpl::reset(); }

void GPT2AttentionImpl::reset() {
  const int64_t d = config.n_embd;
  c_attn = register_module("c_attn", nn::Linear(linear(d, 3 * d, config)));
  c_proj = register_module("c_proj", nn::Linear(linear(d, d, config)));
  resid_dropout = register_module("resid_dropout", nn::Dropout(config.dropout));
}

at::Tensor GPT2AttentionImpl::forward(const at::Tensor& x) {
  const int64_t batch = x.size(0), length = x.size(1);
  const auto qkv = c_attn(x).view({batch, length, 3, -1, config.head_dim()});
  auto part = [&](int64_t i) { return qkv.select(2, i).transpose(1, 2); };  // (B, H, T, D)
  const auto y = at::scaled_dot_product_attention(part(0), part(1), part(2), {}, is_training() ? config.dropout : 0.0,
                                                  /*is_causal=*/true);
  return resid_dropout(c_proj(y.transpose(1, 2).flatten(2)));
}

GPT2MLPImpl::GPT2MLPImpl(const GPT2Config& config) : config(config) { GPT2MLPImpl::reset(); }

void GPT2MLPImpl::reset() {
  const int64_t d = config.n_embd;
  c_fc = register_module("c_fc", nn::Linear(linear(d, 4 * d, config)));
  c_proj = register_module("c_proj", nn::Linear(linear(4 * d, d, config)));
  dropout = register_module("dropout", nn::Dropout(config.dropout));
}

at::Tensor GPT2MLPImpl::forward(const at::Tensor& x) { return dropout(c_proj(at::gelu(c_fc(x), "tanh"))); }

GPT2BlockImpl::GPT2BlockImpl(const GPT2Config& config) : config(config) { GPT2BlockImpl::reset(); }

void GPT2BlockImpl::reset() {
  ln_1 = register_module("ln_1", layer_norm(config));
  attn = register_module("attn", GPT2Attention(config));
  ln_2 = register_module("ln_2", layer_norm(config));
  mlp = register_module("mlp", GPT2MLP(config));
}

at::Tensor GPT2BlockImpl::forward(const at::Tensor& x) {
  const auto y = x + attn(ln_1(x));
  return y + mlp(ln_2(y));
}

GPT2Impl::GPT2Impl(const GPT2Config& config) : config(config) {
  check(config);
  GPT2Impl::reset();
}

void GPT2Impl::reset() {
  wte = register_module("wte", nn::Embedding(config.vocab_size, config.n_embd));
  wpe = register_module("wpe", nn::Embedding(config.max_seq_len, config.n_embd));
  drop = register_module("drop", nn::Dropout(config.dropout));
  h = register_module("h", nn::ModuleList<GPT2Block>());
  for (int64_t i = 0; i < config.n_layer; i++) h->push_back(GPT2Block(config));
  ln_f = register_module("ln_f", layer_norm(config));
  lm_head = register_module("lm_head", TiedHead());
  init_weights();
}

void GPT2Impl::init_weights() {
  const double stream_std = 0.02 / std::sqrt(2.0 * static_cast<double>(config.n_layer));
  auto init = [](nn::Linear& layer, double std) {
    torch::nn::init::normal_(layer->weight, 0, std);
    if (layer->bias.defined()) torch::nn::init::zeros_(layer->bias);
  };
  torch::nn::init::normal_(wte->weight, 0, 0.02);
  torch::nn::init::normal_(wpe->weight, 0, 0.02);
  for (auto& block : h) {
    init(block->attn->c_attn, 0.02);
    init(block->attn->c_proj, stream_std);
    init(block->mlp->c_fc, 0.02);
    init(block->mlp->c_proj, stream_std);
  }
}

at::Tensor GPT2Impl::forward(const at::Tensor& tokens) {
  TESSERA_CHECK(tokens.dim() == 2, UsageError, "GPT2 takes tokens (B, T); they are ", tokens.sizes());
  const int64_t length = tokens.size(1);
  TESSERA_CHECK(length <= config.max_seq_len, UsageError, "GPT2: a sequence of ", length,
                " tokens, and max_seq_len is ", config.max_seq_len);
  const auto positions = replicate_like(tokens, at::arange(length, tokens.device()));
  const auto words = wte(tokens);  // before wpe with every compiler: gradients come in the reverse order
  auto x = drop(words + wpe(positions));
  for (auto& block : h) x = block(x);
  return lm_head(ln_f(x), wte->weight);
}

}  // namespace tessera::models
