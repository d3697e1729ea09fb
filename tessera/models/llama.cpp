#include "tessera/models/llama.h"

#include "tessera/base/error.h"
#include "tessera/models/detail/rope.h"

#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/silu.h>
#include <torch/nn/init.h>

#include <cmath>

namespace tessera::models {
namespace {

nn::Linear linear(int64_t in, int64_t out) { return nn::Linear(torch::nn::LinearOptions(in, out).bias(false)); }

}  // namespace

LlamaAttentionImpl::LlamaAttentionImpl(const LlamaConfig& config) : config(config) { LlamaAttentionImpl::reset(); }

void LlamaAttentionImpl::reset() {
  const int64_t kv_width = config.n_kv_heads * config.head_dim();
  wq = register_module("wq", linear(config.dim, config.dim));
  wk = register_module("wk", linear(config.dim, kv_width));
  wv = register_module("wv", linear(config.dim, kv_width));
  wo = register_module("wo", linear(config.dim, config.dim));
}

at::Tensor LlamaAttentionImpl::forward(const at::Tensor& x, const at::Tensor& rope) {
  const int64_t batch = x.size(0), length = x.size(1), queries_per_key = config.n_heads / config.n_kv_heads;
  auto by_head = [&](nn::Linear& w) { return w(x).view({batch, length, -1, config.head_dim()}); };  // (B, T, H, D)
  auto for_each_query = [&](const at::Tensor& kv) {  // each head as often as queries share it
    if (queries_per_key == 1) return kv;
    return kv.unsqueeze(3).expand({-1, -1, -1, queries_per_key, -1}).flatten(2, 3);
  };
  const auto q = apply_rope(by_head(wq), rope);
  const auto k = for_each_query(apply_rope(by_head(wk), rope)), v = for_each_query(by_head(wv));
  const auto y = at::scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), {}, 0.0,
                                                  /*is_causal=*/true);
  return wo(y.transpose(1, 2).flatten(2));
}

LlamaFeedForwardImpl::LlamaFeedForwardImpl(const LlamaConfig& config) : config(config) {
  LlamaFeedForwardImpl::reset();
}

void LlamaFeedForwardImpl::reset() {
  w1 = register_module("w1", linear(config.dim, config.ffn_dim));
  w2 = register_module("w2", linear(config.ffn_dim, config.dim));
  w3 = register_module("w3", linear(config.dim, config.ffn_dim));
}

at::Tensor LlamaFeedForwardImpl::forward(const at::Tensor& x) { return w2(at::silu(w1(x)) * w3(x)); }

LlamaBlockImpl::LlamaBlockImpl(const LlamaConfig& config) : config(config) { LlamaBlockImpl::reset(); }

void LlamaBlockImpl::reset() {
  attention = register_module("attention", LlamaAttention(config));
  feed_forward = register_module("feed_forward", LlamaFeedForward(config));
  attention_norm = register_module("attention_norm", nn::RMSNorm(config.dim, config.norm_eps));
  ffn_norm = register_module("ffn_norm", nn::RMSNorm(config.dim, config.norm_eps));
}

at::Tensor LlamaBlockImpl::forward(const at::Tensor& x, const at::Tensor& rope) {
  const auto y = x + attention(attention_norm(x), rope);
  return y + feed_forward(ffn_norm(y));
}

LlamaImpl::LlamaImpl(const LlamaConfig& config) : config(config) {
  check(config);
  LlamaImpl::reset();
}

void LlamaImpl::reset() {
  tok_embeddings = register_module("tok_embeddings", nn::Embedding(config.vocab_size, config.dim));
  layers = register_module("layers", nn::ModuleList<LlamaBlock>());
  for (int64_t i = 0; i < config.n_layers; i++) layers->push_back(LlamaBlock(config));
  norm = register_module("norm", nn::RMSNorm(config.dim, config.norm_eps));
  if (config.tied)
    tied_output = register_module("output", TiedHead());
  else
    output = register_module("output", linear(config.dim, config.vocab_size));
  init_weights();
}

void LlamaImpl::init_weights() {
  const double stream_std = 0.02 / std::sqrt(2.0 * static_cast<double>(config.n_layers));
  auto init = [](const at::Tensor& weight, double std) { torch::nn::init::normal_(weight, 0, std); };
  init(tok_embeddings->weight, 0.02);
  for (auto& layer : layers) {
    auto& attention = *layer->attention;
    auto& feed_forward = *layer->feed_forward;
    for (auto* w : {&attention.wq, &attention.wk, &attention.wv, &feed_forward.w1, &feed_forward.w3})
      init((*w)->weight, 0.02);
    for (auto* w : {&attention.wo, &feed_forward.w2}) init((*w)->weight, stream_std);
  }
  if (!config.tied) init(output->weight, 0.02);
}

at::Tensor LlamaImpl::forward(const at::Tensor& tokens) {
  TESSERA_CHECK(tokens.dim() == 2, UsageError, "Llama takes tokens (B, T); they are ", tokens.sizes());
  const int64_t length = tokens.size(1);
  TESSERA_CHECK(length <= config.max_seq_len, UsageError, "Llama: a sequence of ", length,
                " tokens, and max_seq_len is ", config.max_seq_len);
  auto x = tok_embeddings(tokens);
  const auto rope = rope_table(length, config.head_dim(), config.rope_theta, x.device());
  for (auto& layer : layers) x = layer(x, rope);
  x = norm(x);
  return config.tied ? tied_output(x, tok_embeddings->weight) : output(x);
}

}  // namespace tessera::models
