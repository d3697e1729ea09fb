#pragma once
#include <ATen/core/Tensor.h>

// Rotary positions, in real arithmetic: number 2i and 2i+1 of a head are a point that is turned by position /
// theta^(2i/D). These pairs are those of Llama's own weights; models converted for "rotate half" have them in another
// order.
namespace tessera::models {

// (T, D) for positions 0 to T: D/2 cosines, then D/2 sines. Float.
at::Tensor rope_table(int64_t positions, int64_t head_dim, double theta, c10::Device device);

// x (B, T, H, D), turned. Computed in the table's dtype, returned in x's. The heads may be all, a rank's own, or
// distributed; beside a distributed x a plain table counts as whole on its mesh.
at::Tensor apply_rope(const at::Tensor& x, const at::Tensor& table);

}  // namespace tessera::models
