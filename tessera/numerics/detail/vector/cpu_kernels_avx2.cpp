#ifdef __x86_64__
#include "tessera/numerics/detail/vector/cpu_kernels.h"

namespace tessera::numerics {
namespace {

constexpr int kLanes = 8, kTileRows = 6;
#include "tessera/numerics/detail/vector/vector_kernels.inc"

}  // namespace

extern const CpuKernels kAvx2Kernels;
const CpuKernels kAvx2Kernels = kernels_named("avx2");

}  // namespace tessera::numerics
#endif
