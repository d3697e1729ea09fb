#ifdef __x86_64__
#include "tessera/numerics/detail/vector/cpu_kernels.h"

namespace tessera::numerics {
namespace {

constexpr int kLanes = 16, kTileRows = 8;
#include "tessera/numerics/detail/vector/vector_kernels.inc"

}  // namespace

extern const CpuKernels kAvx512Kernels;
const CpuKernels kAvx512Kernels = kernels_named("avx512");

}  // namespace tessera::numerics
#endif
