#pragma once
#include "tessera/numerics/detail/vector/cpu_kernels.h"

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

// Matrix products on the CPU by our own kernel (cpu_kernels.h), panel by panel.
//
//   out (m, n) = a (m, k) @ b (k, n) + bias (n), then the epilogue
//
// A panel is a block of columns of b. It is copied to the first-level cache and multiplied with all rows of a. Bits
// differ from at::mm: sums over k are in another order. They do not depend on the number of threads.
namespace tessera::numerics {

struct TiledProductOptions {
  std::optional<at::Tensor> bias = {};
  ProductEpilogue epilogue = ProductEpilogue::None;
  at::Tensor operand = {}, result = {};  // of the epilogue: contiguous, with as many elements as out
};

// Requires: float32 on the CPU. out: rows without gaps between elements. a and b: unit stride in one of the two dims.
// UsageError otherwise.
void tiled_product(const at::Tensor& out, const at::Tensor& a, const at::Tensor& b,
                   const TiledProductOptions& options = {});

// Products of equal shapes and steps, on the threads of LibTorch. The kernel gets scratch memory.
template <class T>
void multiply_in_parallel(const std::vector<ProductOperands<T>>& products, const CpuKernels& kernels = cpu_kernels());

}  // namespace tessera::numerics
