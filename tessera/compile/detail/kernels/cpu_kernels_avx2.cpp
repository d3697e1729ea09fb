#ifdef __x86_64__
#include "tessera/compile/detail/kernels/cpu_kernels.h"

namespace tessera::compiler {
namespace {

constexpr int kLanes = 8, kTileRows = 6;
#include "tessera/compile/detail/kernels/vector_kernels.inc"

}  // namespace

extern const CpuKernels kAvx2Kernels;
const CpuKernels kAvx2Kernels = kernels_named("avx2");

}  // namespace tessera::compiler
#endif
