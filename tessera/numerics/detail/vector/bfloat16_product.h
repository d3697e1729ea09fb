#pragma once
#include "tessera/numerics/detail/vector/tiled_product.h"

// Matrix products in bfloat16 with sums in float32, on a CPU that has instructions for it
// (bfloat16_product.inc).
namespace tessera::numerics {

// As tiled_product, but a and b are float32 or bfloat16. float32 operands are rounded to bfloat16 first. out is
// float32. Requires cpu_kernels().multiply_bfloat16.
void bfloat16_product(const at::Tensor& out, const at::Tensor& a, const at::Tensor& b,
                      const TiledProductOptions& options = {});

}  // namespace tessera::numerics
