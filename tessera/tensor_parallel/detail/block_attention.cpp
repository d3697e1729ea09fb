#include "tessera/tensor_parallel/detail/block_attention.h"

#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/logaddexp.h>
#include <ATen/ops/logsumexp.h>
#include <ATen/ops/ones.h>

#include <limits>
#include <tuple>

namespace tessera {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// LibTorch's kernel: q, k, v (B, H, t, D) on the CPU with one D, without rows that attend to nothing.
bool has_kernel(const at::Tensor& q, const at::Tensor& v, const BlockMask& mask) {
  return q.is_cpu() && q.dim() == 4 && !mask.visible.defined() && q.size(-1) == v.size(-1) && q.numel() > 0;
}

at::Tensor at_least_float(const at::Tensor& x) {
  return x.scalar_type() == at::kHalf || x.scalar_type() == at::kBFloat16 ? x.to(at::kFloat) : x;
}

at::Tensor masked_scores(const at::Tensor& q, const at::Tensor& k, const BlockMask& mask, double scale) {
  at::Tensor scores = (at_least_float(q) * scale).matmul(at_least_float(k).transpose(-2, -1));
  if (mask.causal) {
    const at::Tensor visible = at::ones({q.size(-2), k.size(-2)}, q.options().dtype(at::kBool)).tril();
    scores = scores.masked_fill(visible.logical_not(), -kInfinity);
  }
  return mask.visible.defined() ? scores.masked_fill(mask.visible.logical_not(), -kInfinity) : scores;
}

// exp(x - lse), and 0 where nothing is attended to: there lse is -inf.
at::Tensor exp_difference(const at::Tensor& x, const at::Tensor& lse) {
  return (x - lse.masked_fill(lse == -kInfinity, 0)).exp();
}

}  // namespace

BlockResult block_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const BlockMask& mask,
                            double scale) {
  if (has_kernel(q, v, mask)) {
    auto [out, lse] = at::_scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, mask.causal, {}, scale);
    return {out, lse};
  }
  const at::Tensor scores = masked_scores(q, k, mask, scale);
  const at::Tensor lse = at::logsumexp(scores, {-1});
  const at::Tensor p = exp_difference(scores, lse.unsqueeze(-1));
  return {p.matmul(at_least_float(v)).to(q.scalar_type()), lse};
}

BlockGradients block_attention_backward(const at::Tensor& gradient, const at::Tensor& q, const at::Tensor& k,
                                        const at::Tensor& v, const BlockResult& merged, const BlockMask& mask,
                                        double scale) {
  if (has_kernel(q, v, mask)) {
    auto [dq, dk, dv] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
        gradient, q, k, v, merged.out.to(q.scalar_type()), merged.lse, 0.0, mask.causal, {}, scale);
    return {dq, dk, dv};
  }
  const at::Tensor p = exp_difference(masked_scores(q, k, mask, scale), merged.lse.unsqueeze(-1));
  const at::Tensor upper = at_least_float(gradient);
  const at::Tensor delta = (upper * merged.out).sum(-1, /*keepdim=*/true);
  const at::Tensor ds = p * (upper.matmul(at_least_float(v).transpose(-2, -1)) - delta) * scale;
  return {ds.matmul(at_least_float(k)), ds.transpose(-2, -1).matmul(at_least_float(q)),
          p.transpose(-2, -1).matmul(upper)};
}

void merge_block(BlockResult& merged, const BlockResult& block, int64_t begin) {
  if (!merged.out.defined()) {
    merged = {at_least_float(block.out), block.lse};
    return;
  }
  const int64_t length = block.lse.size(-1);
  at::Tensor out = merged.out.narrow(-2, begin, length), lse = merged.lse.narrow(-1, begin, length);
  const at::Tensor sum = at::logaddexp(lse, block.lse);
  out.mul_(exp_difference(lse, sum).unsqueeze(-1)).add_(block.out * exp_difference(block.lse, sum).unsqueeze(-1));
  lse.copy_(sum);
}

}  // namespace tessera
