#include "tessera/models/detail/rope.h"

#include "tessera/cuda/detail/transformer_kernels.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/models/detail/replicate_like.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/outer.h>
#include <ATen/ops/pow.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/view_as_complex.h>
#include <ATen/ops/view_as_real.h>

namespace tessera::models {

at::Tensor rope_table(const at::Tensor& positions, int64_t head_dim, double theta) {
  at::NoGradGuard no_grad;
  const auto options = at::TensorOptions(positions.device()).dtype(at::kFloat);
  const auto frequency = at::pow(theta, at::arange(0, head_dim, 2, options).div(head_dim)).reciprocal();  // (D/2)
  const auto angle = at::outer(positions.to(options), frequency);                                         // (T, D/2)
  return at::view_as_complex(at::stack({angle.cos(), angle.sin()}, -1));
}

at::Tensor apply_rope(const at::Tensor& x, const at::Tensor& table) {
  const auto plain_angles = at::view_as_real(table);  // (T, D/2, 2)
  if (!is_dtensor(x) && cuda::has_rotary(x, plain_angles)) return cuda::rotary(x, plain_angles);
  const auto angles = replicate_like(x, plain_angles);
  const auto cos = angles.select(-1, 0).unsqueeze(1), sin = angles.select(-1, 1).unsqueeze(1);  // (T, 1, D/2)
  const auto pairs = x.to(at::kFloat).unflatten(-1, {-1, 2});                                   // (B, T, H, D/2, 2)
  const auto even = pairs.select(-1, 0), odd = pairs.select(-1, 1);
  const auto rotated = at::stack({even.mul(cos).sub(odd.mul(sin)), even.mul(sin).add(odd.mul(cos))}, -1);
  return rotated.flatten(-2).to(x.scalar_type());
}

}  // namespace tessera::models
