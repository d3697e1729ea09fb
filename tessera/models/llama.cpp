#include "tessera/models/llama.h"

#include "tessera/base/error.h"
#include "tessera/cuda/detail/transformer_kernels.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/models/detail/rope.h"
#include "tessera/tensor_parallel/context_parallel.h"

#include <ATen/ops/silu.h>
#include <torch/nn/init.h>

namespace tessera::models {

LlamaAttentionImpl::LlamaAttentionImpl(const LlamaConfig& config) : config(config) { LlamaAttentionImpl::reset(); }

void LlamaAttentionImpl::reset() {
  const int64_t kv_width = config.n_kv_heads * config.head_dim();
  wq = register_module("wq", linear(config.dim, config.dim, /*bias=*/false));
  wk = register_module("wk", linear(config.dim, kv_width, /*bias=*/false));
  wv = register_module("wv", linear(config.dim, kv_width, /*bias=*/false));
  wo = register_module("wo", linear(config.dim, config.dim, /*bias=*/false));
}

at::Tensor LlamaAttentionImpl::forward(const at::Tensor& x, const at::Tensor& rope) {
  const int64_t batch = x.size(0), length = x.size(1), queries_per_key = config.n_heads / config.n_kv_heads;
  auto by_head = [&](nn::Linear& w) { return w(x).view({batch, length, -1, config.head_dim()}); };  // (B, T, H, D)
  const auto q = apply_rope(by_head(wq), rope);
  auto repeat_kv = [&](const at::Tensor& kv) {  // repeats each head for the query heads that share it
    if (queries_per_key == 1 || shares_key_heads(q)) return kv;
    return kv.unsqueeze(3).expand({-1, -1, -1, queries_per_key, -1}).flatten(2, 3);
  };
  const auto k = repeat_kv(apply_rope(by_head(wk), rope)), v = repeat_kv(by_head(wv));
  return wo(causal_attention(q, k, v, /*dropout=*/0.0));
}

LlamaFeedForwardImpl::LlamaFeedForwardImpl(const LlamaConfig& config) : config(config) {
  LlamaFeedForwardImpl::reset();
}

void LlamaFeedForwardImpl::reset() {
  w1 = register_module("w1", linear(config.dim, config.ffn_dim, /*bias=*/false));
  w2 = register_module("w2", linear(config.ffn_dim, config.dim, /*bias=*/false));
  w3 = register_module("w3", linear(config.dim, config.ffn_dim, /*bias=*/false));
}

at::Tensor LlamaFeedForwardImpl::forward(const at::Tensor& x) {
  const auto gate = w1(x), up = w3(x);
  const bool fused = !is_dtensor(gate) && !is_dtensor(up) && cuda::has_swiglu(gate, up);
  return w2(fused ? cuda::swiglu(gate, up) : at::silu(gate) * up);
}

LlamaBlockImpl::LlamaBlockImpl(const LlamaConfig& config) : config(config) { LlamaBlockImpl::reset(); }

void LlamaBlockImpl::reset() {
  attention = register_module("attention", LlamaAttention(config));
  if (config.moe.n_experts > 0)
    moe = register_module("moe", MoE(config.dim, config.ffn_dim, config.moe));
  else
    feed_forward = register_module("feed_forward", LlamaFeedForward(config));
  attention_norm = register_module("attention_norm", nn::RMSNorm(config.dim, config.norm_eps));
  ffn_norm = register_module("ffn_norm", nn::RMSNorm(config.dim, config.norm_eps));
}

at::Tensor LlamaBlockImpl::forward(const at::Tensor& x, const at::Tensor& rope) {
  const auto y = x + attention(attention_norm(x), rope);
  const auto z = ffn_norm(y);
  return y + (moe.is_empty() ? feed_forward(z) : moe(z));
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
    output = register_module("output", linear(config.dim, config.vocab_size, /*bias=*/false));
  init_weights();
}

void LlamaImpl::init_weights() {
  const double residual_std = residual_init_std(config.n_layers);
  torch::nn::init::normal_(tok_embeddings->weight, 0, kInitStd);
  for (auto& layer : layers) {
    auto& attention = *layer->attention;
    for (auto* w : {&attention.wq, &attention.wk, &attention.wv}) init_linear(*w, kInitStd);
    if (!layer->moe.is_empty()) {
      init_linear(attention.wo, residual_std);
      layer->moe->init_weights(kInitStd, residual_std);
      continue;
    }
    auto& feed_forward = *layer->feed_forward;
    for (auto* w : {&feed_forward.w1, &feed_forward.w3}) init_linear(*w, kInitStd);
    for (auto* w : {&attention.wo, &feed_forward.w2}) init_linear(*w, residual_std);
  }
  if (!config.tied) init_linear(output, kInitStd);
}

at::Tensor LlamaImpl::embed(const at::Tensor& tokens) {
  check_tokens("Llama", tokens, config.max_seq_len);
  return tok_embeddings(tokens);
}

at::Tensor LlamaImpl::rope(const at::Tensor& embedded) const {
  return rope_table(sequence_positions(embedded.size(1), embedded.device()), config.head_dim(), config.rope_theta);
}

at::Tensor LlamaImpl::head(const at::Tensor& x) {
  const auto y = norm(x);
  return config.tied ? tied_output(y, tok_embeddings->weight) : output(y);
}

at::Tensor LlamaImpl::forward(const at::Tensor& tokens) {
  auto x = embed(tokens);
  const auto angles = rope(x);
  for (auto& layer : layers) x = layer(x, angles);
  return head(x);
}

pipelining::PipelineLayers pipeline_layers(const Llama& model) {
  pipelining::PipelineLayers chain;
  chain.push_back({"tok_embeddings",
                   [model = Llama(model)](const at::Tensor& tokens) mutable { return model->embed(tokens); },
                   {model->tok_embeddings.ptr()}});
  auto layers = model->layers;
  for (auto& layer : layers)
    chain.push_back({c10::str("layers.", chain.size() - 1),
                     [model = Llama(model), layer](const at::Tensor& x) mutable { return layer(x, model->rope(x)); },
                     {layer.ptr()}});
  std::vector<std::shared_ptr<torch::nn::Module>> head = {model->norm.ptr()};
  if (model->config.tied)
    head.insert(head.end(), {model->tied_output.ptr(), model->tok_embeddings.ptr()});
  else
    head.push_back(model->output.ptr());
  chain.push_back(
      {"norm", [model = Llama(model)](const at::Tensor& x) mutable { return model->head(x); }, std::move(head)});
  return chain;
}

void expert_parallel(const Llama& model, const DeviceMesh& mesh) {
  const LlamaConfig& config = model->config;
  TESSERA_CHECK(config.moe.n_experts > 0, UsageError, "expert_parallel: the model has no experts: ", config,
                ". Write LlamaConfig::moe.n_experts");
  auto layers = model->layers;
  for (auto& layer : layers) layer->moe->expert_parallel(mesh);
}

std::vector<RouterStatistics> router_statistics(const Llama& model) {
  std::vector<RouterStatistics> all;
  auto layers = model->layers;
  for (auto& layer : layers)
    if (!layer->moe.is_empty()) all.push_back(layer->moe->statistics());
  return all;
}

void update_expert_bias(const Llama& model, const comm::Group& group) {
  auto layers = model->layers;
  for (auto& layer : layers)
    if (!layer->moe.is_empty()) layer->moe->update_bias(group);
}

}  // namespace tessera::models
