#pragma once
#include <ATen/core/Tensor.h>

// Rotary position embeddings in real arithmetic: features 2i and 2i+1 of a head form a pair that is rotated by the
// angle position / theta^(2i/D). Meta's Llama weights use these pairs. Weights converted for "rotate half" use another
// order.
namespace tessera::models {

// A float tensor (T, D) for T positions: D/2 cosines, then D/2 sines.
at::Tensor rope_table(const at::Tensor& positions, int64_t head_dim, double theta);

// Rotates x (B, T, H, D). Computes in the dtype of the table and returns the dtype of x. The heads may be all heads,
// local heads, or distributed. With a distributed x, a plain table is treated as replicated.
at::Tensor apply_rope(const at::Tensor& x, const at::Tensor& table);

}  // namespace tessera::models
