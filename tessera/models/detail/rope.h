#pragma once
#include <ATen/core/Tensor.h>

// Rotary position embeddings in real arithmetic: features 2i and 2i+1 of a head form a pair that is rotated by the
// angle position / theta^(2i/D). Meta's Llama weights use these pairs. Weights converted for "rotate half" use another
// order.
namespace tessera::models {

// A complex tensor (T, D/2) for T positions: cos(angle) + i sin(angle). Mixed precision casts floating-point inputs of
// a module to bfloat16, which has too few digits for angles, and leaves complex ones alone.
at::Tensor rope_table(const at::Tensor& positions, int64_t head_dim, double theta);

// Rotates x (B, T, H, D). Computes in float32 and returns the dtype of x. The heads may be all heads,
// local heads, or distributed. With a distributed x, a plain table is treated as replicated.
at::Tensor apply_rope(const at::Tensor& x, const at::Tensor& table);

}  // namespace tessera::models
