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

BlockResult kernel_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, bool causal, double scale) {
  auto [out, lse] = at::_scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, {}, scale);
  return {out, lse};
}
BlockGradients kernel_backward(const at::Tensor& gradient, const at::Tensor& q, const at::Tensor& k,
                               const at::Tensor& v, const BlockResult& merged, bool causal, double scale) {
  auto [dq, dk, dv] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
      gradient, q, k, v, merged.out.to(q.scalar_type()), merged.lse, 0.0, causal, {}, scale);
  return {dq, dk, dv};
}

// The kernel computes tiles of 512 keys, also where a causal mask hides them. So a causal block is halved, its halves
// are halved again, and so on:
//
//   a .    a and b are causal. One call computes both, as twice as many heads (fold).
//   c b    c has no mask.
constexpr int64_t kSmallestCausal = 128;

// The number of causal parts on the diagonal: 1, 2, 4, ...
int64_t diagonal_parts(const at::Tensor& q, const at::Tensor& k) {
  int64_t parts = 1;
  if (q.size(2) != k.size(2) || q.size(1) != k.size(1)) return parts;
  while (q.size(2) / parts > kSmallestCausal && q.size(2) % (2 * parts) == 0) parts *= 2;
  return parts;
}

// (B, H, t, ...) as (B, H n, t / n, ...), and back.
at::Tensor fold(const at::Tensor& x, int64_t n) { return x.unflatten(2, {n, x.size(2) / n}).flatten(1, 2); }
at::Tensor unfold(const at::Tensor& x, int64_t n) { return x.unflatten(1, {x.size(1) / n, n}).flatten(2, 3); }
// A tensor of which fold() is a view.
at::Tensor foldable(const at::Tensor& x) { return x.stride(1) == x.size(2) * x.stride(2) ? x : x.contiguous(); }
at::Tensor first_half(const at::Tensor& x) { return x.narrow(2, 0, x.size(2) / 2); }
at::Tensor second_half(const at::Tensor& x) { return x.narrow(2, x.size(2) / 2, x.size(2) / 2); }

BlockResult causal_attention(at::Tensor q, at::Tensor k, at::Tensor v, double scale) {
  const int64_t parts = diagonal_parts(q, k);
  if (parts == 1) return kernel_attention(q, k, v, /*causal=*/true, scale);
  for (at::Tensor* x : {&q, &k, &v}) *x = foldable(*x);
  const BlockResult diagonal = kernel_attention(fold(q, parts), fold(k, parts), fold(v, parts), /*causal=*/true, scale);
  const BlockResult merged{at_least_float(unfold(diagonal.out, parts)).contiguous(),
                           unfold(diagonal.lse, parts).contiguous()};
  for (int64_t n = parts / 2; n >= 1; n /= 2) {
    BlockResult folded{fold(merged.out, n), fold(merged.lse, n)};
    merge_block(folded,
                kernel_attention(second_half(fold(q, n)), first_half(fold(k, n)), first_half(fold(v, n)),
                                 /*causal=*/false, scale),
                folded.lse.size(2) / 2);
  }
  return merged;
}

BlockGradients causal_backward(at::Tensor gradient, at::Tensor q, at::Tensor k, at::Tensor v, BlockResult merged,
                               double scale) {
  const int64_t parts = diagonal_parts(q, k);
  if (parts == 1) return kernel_backward(gradient, q, k, v, merged, /*causal=*/true, scale);
  merged.out = merged.out.to(q.scalar_type());
  for (at::Tensor* x : {&gradient, &q, &k, &v, &merged.out}) *x = foldable(*x);
  merged.lse = merged.lse.contiguous();
  BlockGradients sum = kernel_backward(fold(gradient, parts), fold(q, parts), fold(k, parts), fold(v, parts),
                                       {fold(merged.out, parts), fold(merged.lse, parts)}, /*causal=*/true, scale);
  for (at::Tensor* x : {&sum.q, &sum.k, &sum.v}) *x = at_least_float(unfold(*x, parts)).contiguous();
  for (int64_t n = parts / 2; n >= 1; n /= 2) {
    const BlockGradients below = kernel_backward(
        second_half(fold(gradient, n)), second_half(fold(q, n)), first_half(fold(k, n)), first_half(fold(v, n)),
        {second_half(fold(merged.out, n)), second_half(fold(merged.lse, n))}, /*causal=*/false, scale);
    second_half(fold(sum.q, n)).add_(below.q);
    first_half(fold(sum.k, n)).add_(below.k);
    first_half(fold(sum.v, n)).add_(below.v);
  }
  return sum;
}

// exp(x - lse), and 0 where nothing is attended to: there lse is -inf.
at::Tensor exp_difference(const at::Tensor& x, const at::Tensor& lse) {
  return (x - lse.masked_fill(lse == -kInfinity, 0)).exp();
}

}  // namespace

BlockResult block_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const BlockMask& mask,
                            double scale) {
  if (has_kernel(q, v, mask))
    return mask.causal ? causal_attention(q, k, v, scale) : kernel_attention(q, k, v, /*causal=*/false, scale);
  const at::Tensor scores = masked_scores(q, k, mask, scale);
  const at::Tensor lse = at::logsumexp(scores, {-1});
  const at::Tensor p = exp_difference(scores, lse.unsqueeze(-1));
  return {p.matmul(at_least_float(v)).to(q.scalar_type()), lse};
}

BlockGradients block_attention_backward(const at::Tensor& gradient, const at::Tensor& q, const at::Tensor& k,
                                        const at::Tensor& v, const BlockResult& merged, const BlockMask& mask,
                                        double scale) {
  if (has_kernel(q, v, mask))
    return mask.causal ? causal_backward(gradient, q, k, v, merged, scale)
                       : kernel_backward(gradient, q, k, v, merged, /*causal=*/false, scale);
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
  out.mul_(exp_difference(lse, sum).unsqueeze(-1));
  out.addcmul_(at_least_float(block.out), exp_difference(block.lse, sum).unsqueeze(-1));
  lse.copy_(sum);
}

}  // namespace tessera
