#pragma once
#include "tessera/nn/holder.h"
#include "tessera/nn/modules.h"

// Layers and helper functions that several models use.
namespace tessera::models {

// An output layer that shares its weight with the embedding. It is a module, so a plan can name it and it can have
// hooks. It takes the weight as an argument in each call. If it registered the weight, parameters() would list it twice
// and LibTorch's optimizers would step it twice.
struct TiedHeadImpl : torch::nn::Cloneable<TiedHeadImpl> {
  void reset() override {}
  at::Tensor forward(const at::Tensor& x, const at::Tensor& weight);
};
TESSERA_MODULE(TiedHead);

nn::Linear linear(int64_t in, int64_t out, bool bias);

// Causal attention of q, k, v (B, T, H, D). Returns (B, T, H * D). k and v have as many heads as q or, if
// shares_key_heads(q), a divisor of that: kernels of LibTorch for CUDA read a head once for all queries that share it.
at::Tensor causal_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, double dropout);
bool shares_key_heads(const at::Tensor& q);

// Checks that tokens are (B, T) with T <= max_seq_len. Throws UsageError with the model's name otherwise.
void check_tokens(const char* model, const at::Tensor& tokens, int64_t max_seq_len);

// The standard deviation of initial weights, and that of layers whose output is added to the residual stream (GPT-2).
constexpr double kInitStd = 0.02;
double residual_init_std(int64_t n_layers);  // kInitStd / sqrt(2 n_layers)

// Initializes a Linear: weight normal(0, std), bias 0.
void init_linear(nn::Linear& layer, double std);

}  // namespace tessera::models
