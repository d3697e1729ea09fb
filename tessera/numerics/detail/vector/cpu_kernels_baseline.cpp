#include "tessera/numerics/detail/vector/cpu_kernels.h"

namespace tessera::numerics {
namespace {

constexpr int kLanes = 4, kTileRows = 4;
#include "tessera/numerics/detail/vector/vector_kernels.inc"

}  // namespace

extern const CpuKernels kBaselineKernels;
const CpuKernels kBaselineKernels = kernels_named("baseline");

}  // namespace tessera::numerics
