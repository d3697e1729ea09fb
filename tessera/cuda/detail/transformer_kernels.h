#pragma once
#include <ATen/core/Tensor.h>

#include <string>

// Rotary embedding and gated SiLU of bfloat16 tensors that read and write each element once, with their gradients.
// LibTorch's chains make about ten passes over float copies. Results are rounded where the chains round.
namespace tessera::cuda {

// Are there kernels for these tensors? Otherwise LibTorch's chain serves.
bool has_rotary(const at::Tensor& x, const at::Tensor& table);
bool has_swiglu(const at::Tensor& gate, const at::Tensor& up);

// Rotates neighbours, a pair (x0, x1) by the angle of its position: (x0 cos - x1 sin, x0 sin + x1 cos).
// x (B, T, H, D); table (T, D / 2, 2) of float: cosine and sine of each pair of features. Differentiable in x.
at::Tensor rotary(const at::Tensor& x, const at::Tensor& table);

// silu(gate) * up. Differentiable in both.
at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up);

// The source of the kernels. For tests.
const std::string& transformer_source();

}  // namespace tessera::cuda
