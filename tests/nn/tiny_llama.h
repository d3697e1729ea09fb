#pragma once
#include <torch/torch.h>

#include <cmath>

// The parameters and buffers of a small Llama, built from torch::nn modules. It has no forward.
namespace tessera::test {

struct LlamaSizes {
  int64_t dim = 10, layers = 2, ffn = 14, vocab = 11, heads = 2, kv_heads = 1, context = 6;
};

// A table of rotary embeddings, computed as models compute it.
inline at::Tensor rope_table(const LlamaSizes& s) {
  const auto half = torch::arange(0, s.dim / s.heads, 2, torch::kFloat) / static_cast<double>(s.dim / s.heads);
  const auto angles = torch::outer(torch::arange(s.context, torch::kFloat), torch::pow(10000.0, -half));
  return torch::stack({torch::cos(angles), torch::sin(angles)});
}

struct TinyNormImpl : torch::nn::Module {
  at::Tensor weight;
  explicit TinyNormImpl(int64_t dim) { weight = register_parameter("weight", torch::ones({dim})); }
};
TORCH_MODULE(TinyNorm);

struct TinyBlockImpl : torch::nn::Module {
  explicit TinyBlockImpl(const LlamaSizes& s) {
    const auto linear = [&](const char* name, int64_t in, int64_t out) {
      auto it = register_module(name, torch::nn::Linear(torch::nn::LinearOptions(in, out).bias(name[0] == 'q')));
      torch::nn::init::normal_(it->weight, 0, 0.02);
    };
    const int64_t kv = s.dim / s.heads * s.kv_heads;
    register_module("norm1", TinyNorm(s.dim));
    linear("q", s.dim, s.dim);
    linear("k", s.dim, kv);
    linear("v", s.dim, kv);
    linear("o", s.dim, s.dim);
    register_module("norm2", TinyNorm(s.dim));
    linear("gate", s.dim, s.ffn);
    linear("up", s.dim, s.ffn);
    linear("down", s.ffn, s.dim);
  }
};
TORCH_MODULE(TinyBlock);

struct TinyLlamaImpl : torch::nn::Module {
  torch::nn::Embedding tokens{nullptr};
  at::Tensor rope, mask;
  explicit TinyLlamaImpl(const LlamaSizes& s) {
    tokens = register_module(
        "tokens", torch::nn::Embedding(torch::nn::EmbeddingOptions(s.vocab, s.dim).padding_idx(s.vocab - 2)));
    for (int64_t i = 0; i < s.layers; i++) register_module("layer" + std::to_string(i), TinyBlock(s));
    register_module("norm", TinyNorm(s.dim));
    register_module("head", torch::nn::Linear(torch::nn::LinearOptions(s.dim, s.vocab).bias(false)));
    rope = register_buffer("rope", rope_table(s));
    mask = register_buffer("mask", torch::ones({s.context, s.context}, torch::kBool).tril());
  }
};
TORCH_MODULE(TinyLlama);

}  // namespace tessera::test
