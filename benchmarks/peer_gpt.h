#pragma once
#include "tessera/nn/modules.h"
#include "tessera/tensor_parallel/plan.h"

#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/pimpl.h>

#include <ATen/ops/gelu.h>
#include <ATen/ops/scaled_dot_product_attention.h>

#include <vector>

// The small GPT of the benchmarks. benchmarks/peers/tp.py has the same model in Python: separate q, k and v, biases, no
// position embedding, untied output. `Layers` selects LibTorch's or Tessera's modules.
namespace tessera::bench {

struct TorchLayers {
  using Linear = torch::nn::Linear;
  using LayerNorm = torch::nn::LayerNorm;
  using Embedding = torch::nn::Embedding;
  template <class Impl>
  using Holder = torch::nn::ModuleHolder<Impl>;
};
struct TesseraLayers {
  using Linear = nn::Linear;
  using LayerNorm = nn::LayerNorm;
  using Embedding = nn::Embedding;
  template <class Impl>
  using Holder = tessera::Holder<Impl>;
};

struct PeerGptSizes {
  int64_t dim = 256, layers = 4, vocabulary = 256, head = 64;
};

template <class Layers>
struct PeerBlock : torch::nn::Module {
  using Linear = typename Layers::Linear;
  using LayerNorm = typename Layers::LayerNorm;

  explicit PeerBlock(const PeerGptSizes& s)
      : head(s.head),
        n1(torch::nn::LayerNormOptions({s.dim})),
        n2(torch::nn::LayerNormOptions({s.dim})),
        q(s.dim, s.dim),
        k(s.dim, s.dim),
        v(s.dim, s.dim),
        o(s.dim, s.dim),
        w1(s.dim, 4 * s.dim),
        w2(4 * s.dim, s.dim) {
    register_module("n1", n1), register_module("n2", n2);
    register_module("q", q), register_module("k", k), register_module("v", v), register_module("o", o);
    register_module("w1", w1), register_module("w2", w2);
  }

  at::Tensor forward(const at::Tensor& x) {
    const int64_t batch = x.size(0), length = x.size(1);
    const auto in = n1(x);
    const auto heads = [&](Linear& linear) { return linear(in).view({batch, length, -1, head}).transpose(1, 2); };
    const auto mixed = at::scaled_dot_product_attention(heads(q), heads(k), heads(v), {}, 0.0, /*is_causal=*/true);
    const auto y = x + o(mixed.transpose(1, 2).reshape({batch, length, -1}));
    return y + w2(at::gelu(w1(n2(y))));
  }

  int64_t head;
  LayerNorm n1, n2;
  Linear q, k, v, o, w1, w2;
};

template <class Layers>
struct PeerGpt : torch::nn::Module {
  using Block = typename Layers::template Holder<PeerBlock<Layers>>;

  explicit PeerGpt(const PeerGptSizes& s = {})
      : e(s.vocabulary, s.dim), n(torch::nn::LayerNormOptions({s.dim})), out(s.dim, s.vocabulary) {
    register_module("e", e);
    torch::nn::ModuleList b;
    for (int64_t i = 0; i < s.layers; i++) b->push_back(blocks.emplace_back(s));
    register_module("b", b);
    register_module("n", n), register_module("out", out);
  }

  at::Tensor forward(const at::Tensor& tokens) {  // (B, T) -> logits (B, T, vocabulary)
    auto x = e(tokens);
    for (auto& block : blocks) x = block(x);
    return out(n(x));
  }

  typename Layers::Embedding e;
  std::vector<Block> blocks;
  typename Layers::LayerNorm n;
  typename Layers::Linear out;
};

// Shards attention by heads, feed-forward by hidden features, and output by vocabulary (for LossParallel). n1 returns a
// DTensor, so that the gradients of q, k and v are added locally before one all-reduce instead of three.
inline Plan peer_gpt_plan(const PeerGptSizes& s = {}) {
  return {{"b.*.n1", PrepareModuleOutput{Replicate(), Replicate(), /*use_local_output=*/false}},
          {"b.*.[qkv]", ColwiseParallel{.block = s.head}},
          {"b.*.o", RowwiseParallel{.block = s.head}},
          {"b.*.w1", ColwiseParallel()},
          {"b.*.w2", RowwiseParallel()},
          {"out", ColwiseParallel{.use_local_output = false}}};
}

}  // namespace tessera::bench
