#pragma once
#include <ATen/core/Tensor.h>

// Attention of queries to a part of the keys, so that parts can be merged:
//
//   out = sum_j p_j v_j,   p_j = exp(s_j - lse),   lse = log sum_j exp(s_j),   s_j = scale q k_j
//
// For two parts a and b of the keys:  lse = log(exp(lse_a) + exp(lse_b)),
//                                     out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b.
// The gradients of a part need only the merged out and lse.
namespace tessera {

struct BlockMask {
  bool causal = false;      // query i attends to keys 0 to i
  at::Tensor visible = {};  // (t, s) or (..., 1, t, s) booleans; undefined: everything
};

struct BlockResult {
  at::Tensor out;  // (..., heads, t, D)
  at::Tensor lse;  // (..., heads, t); -inf where a query attends to nothing
};

BlockResult block_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const BlockMask& mask,
                            double scale);

struct BlockGradients {
  at::Tensor q, k, v;
};
// `merged` is the result over all keys.
BlockGradients block_attention_backward(const at::Tensor& gradient, const at::Tensor& q, const at::Tensor& k,
                                        const at::Tensor& v, const BlockResult& merged, const BlockMask& mask,
                                        double scale);

// Adds the attention to more keys, for the queries `begin` to the last. The merged result has at least the precision of
// float.
void merge_block(BlockResult& merged, const BlockResult& block, int64_t begin);

}  // namespace tessera
