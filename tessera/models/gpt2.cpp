#include "tessera/models/gpt2.h"

#include "tessera/models/detail/replicate_like.h"
#include "tessera/tensor_parallel/context_parallel.h"

#include <ATen/ops/gelu.h>
#include <torch/nn/init.h>

namespace tessera::models {
namespace {

nn::LayerNorm layer_norm(const GPT2Config& config) {
  nn::LayerNorm norm(torch::nn::LayerNormOptions({config.n_embd}).eps(config.norm_eps));
  return norm;
}

}  // namespace

GPT2AttentionImpl::GPT2AttentionImpl(const GPT2Config& config) : config(config) { GPT2AttentionImpl::reset(); }

void GPT2AttentionImpl::reset() {
  const int64_t d = config.n_embd;
  c_attn = register_module("c_attn", linear(d, 3 * d, config.bias));
  c_proj = register_module("c_proj", linear(d, d, config.bias));
  resid_dropout = register_module("resid_dropout", nn::Dropout(config.dropout));
}

at::Tensor GPT2AttentionImpl::forward(const at::Tensor& x) {
  const int64_t batch = x.size(0), length = x.size(1);
  const auto qkv = c_attn(x).view({batch, length, 3, -1, config.head_dim()});
  const auto parts = qkv.unbind(2);  // q, k, v (B, T, H, D); its backward is one stack
  const double dropout = is_training() ? config.dropout : 0.0;
  return resid_dropout(c_proj(causal_attention(parts[0], parts[1], parts[2], dropout)));
}

GPT2MLPImpl::GPT2MLPImpl(const GPT2Config& config) : config(config) { GPT2MLPImpl::reset(); }

void GPT2MLPImpl::reset() {
  const int64_t d = config.n_embd;
  c_fc = register_module("c_fc", linear(d, 4 * d, config.bias));
  c_proj = register_module("c_proj", linear(4 * d, d, config.bias));
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
  const double residual_std = residual_init_std(config.n_layer);
  torch::nn::init::normal_(wte->weight, 0, kInitStd);
  torch::nn::init::normal_(wpe->weight, 0, kInitStd);
  for (auto& block : h) {
    init_linear(block->attn->c_attn, kInitStd);
    init_linear(block->attn->c_proj, residual_std);
    init_linear(block->mlp->c_fc, kInitStd);
    init_linear(block->mlp->c_proj, residual_std);
  }
}

at::Tensor GPT2Impl::embed(const at::Tensor& tokens) {
  check_tokens("GPT2", tokens, config.max_seq_len);
  const auto positions = replicate_like(tokens, sequence_positions(tokens.size(1), tokens.device()));
  // A statement of its own: the order of wte and wpe, and so that of their gradients, must not depend on the compiler.
  const auto words = wte(tokens);
  return drop(words + wpe(positions));
}

at::Tensor GPT2Impl::head(const at::Tensor& x) { return lm_head(ln_f(x), wte->weight); }

at::Tensor GPT2Impl::forward(const at::Tensor& tokens) {
  auto x = embed(tokens);
  for (auto& block : h) x = block(x);
  return head(x);
}

pipelining::PipelineLayers pipeline_layers(const GPT2& model) {
  pipelining::PipelineLayers layers;
  layers.push_back({"wte",
                    [model = GPT2(model)](const at::Tensor& tokens) mutable { return model->embed(tokens); },
                    {model->wte.ptr(), model->wpe.ptr(), model->drop.ptr()}});
  auto blocks = model->h;
  for (auto& block : blocks)
    layers.push_back(
        {c10::str("h.", layers.size() - 1), [block](const at::Tensor& x) mutable { return block(x); }, {block.ptr()}});
  layers.push_back({"ln_f",
                    [model = GPT2(model)](const at::Tensor& x) mutable { return model->head(x); },
                    {model->ln_f.ptr(), model->lm_head.ptr(), model->wte.ptr()}});
  return layers;
}

}  // namespace tessera::models
