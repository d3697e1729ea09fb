#include "tessera/models/detail/layers.h"

#include "tessera/base/error.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/numerics/detail/shard_batch.h"
#include "tessera/tensor_parallel/context_parallel.h"

#include <ATen/ops/linear.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <torch/nn/init.h>

#include <cmath>

namespace tessera::models {

at::Tensor TiedHeadImpl::forward(const at::Tensor& x, const at::Tensor& weight) {
  return at::linear(x, numerics::separate_use(weight));
}

nn::Linear linear(int64_t in, int64_t out, bool bias) {
  return nn::Linear(torch::nn::LinearOptions(in, out).bias(bias));
}

at::Tensor causal_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, double dropout) {
  const auto y =
      at::scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), {}, dropout,
                                       /*is_causal=*/true, /*scale=*/{}, /*enable_gqa=*/k.size(2) != q.size(2));
  return y.transpose(1, 2).flatten(2);
}

bool shares_key_heads(const at::Tensor& q) {
  const auto dtype = q.scalar_type();
  return q.is_cuda() && !is_dtensor(q) && (dtype == at::kBFloat16 || dtype == at::kHalf);
}

void check_tokens(const char* model, const at::Tensor& tokens, int64_t max_seq_len) {
  TESSERA_CHECK(tokens.dim() == 2, UsageError, model, " takes tokens (B, T); found sizes ", tokens.sizes());
  const int64_t length = sequence_length(tokens.size(1));
  TESSERA_CHECK(length <= max_seq_len, UsageError, model, ": the sequence has ", length, " tokens, but max_seq_len is ",
                max_seq_len);
}

double residual_init_std(int64_t n_layers) { return kInitStd / std::sqrt(2.0 * static_cast<double>(n_layers)); }

void init_linear(nn::Linear& layer, double std) {
  torch::nn::init::normal_(layer->weight, 0, std);
  if (layer->bias.defined()) torch::nn::init::zeros_(layer->bias);
}

}  // namespace tessera::models
