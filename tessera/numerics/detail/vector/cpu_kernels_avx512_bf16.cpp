#ifdef __x86_64__
#include "tessera/numerics/detail/vector/cpu_kernels.h"

#include <immintrin.h>

namespace tessera::numerics {
namespace {

constexpr int kLanes = 16, kTileRows = 8;
#include "tessera/numerics/detail/vector/vector_kernels.inc"

#include "tessera/numerics/detail/vector/bfloat16_product.inc"  // which uses the functions of vector_kernels.inc

constexpr CpuKernels with_bfloat16() {
  auto kernels = kernels_named("avx512_bf16");
  kernels.multiply_bfloat16 = multiply_bfloat16;
  kernels.bfloat16_scratch = kBlockRows * kPairs;
  return kernels;
}

}  // namespace

extern const CpuKernels kAvx512Bf16Kernels;
const CpuKernels kAvx512Bf16Kernels = with_bfloat16();

}  // namespace tessera::numerics
#endif
