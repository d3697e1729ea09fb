#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

// Matrix products in float32 on the CPU by oneDNN's kernel for small blocks (at::native::cpublas::brgemm), tile by
// tile.
//
//   out (m, n) = a (m, k) @ b (k, n) + bias (n)
//
// A tile is a block of rows of `out`. If b is transposed in memory, as the weight of a linear layer is, it is copied to
// row-major order once per product; of a, each tile copies its own rows. Bits differ from at::mm: sums over k are in
// another order. The result does not depend on the number of threads.
//
// The op tessera::tiled_product(Tensor(a!) out, Tensor a, Tensor b, Tensor? bias) calls it.
namespace tessera::compiler::codegen {

// Does this processor have the kernel?
bool has_tiled_product();

// Requires: float32 on the CPU. out: rows without gaps between elements. a and b: unit stride in one of the two dims.
// UsageError otherwise.
void tiled_product(const at::Tensor& out, const at::Tensor& a, const at::Tensor& b,
                   const std::optional<at::Tensor>& bias);

}  // namespace tessera::compiler::codegen
