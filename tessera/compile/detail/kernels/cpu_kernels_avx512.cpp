#ifdef __x86_64__
#include "tessera/compile/detail/kernels/cpu_kernels.h"

namespace tessera::compiler {
namespace {

constexpr int kLanes = 16, kTileRows = 8;
#include "tessera/compile/detail/kernels/vector_kernels.inc"

}  // namespace

extern const CpuKernels kAvx512Kernels;
const CpuKernels kAvx512Kernels = kernels_named("avx512");

}  // namespace tessera::compiler
#endif
