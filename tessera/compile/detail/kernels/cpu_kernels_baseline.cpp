#include "tessera/compile/detail/kernels/cpu_kernels.h"

namespace tessera::compiler {
namespace {

constexpr int kLanes = 4, kTileRows = 4;
#include "tessera/compile/detail/kernels/vector_kernels.inc"

}  // namespace

extern const CpuKernels kBaselineKernels;
const CpuKernels kBaselineKernels = kernels_named("baseline");

}  // namespace tessera::compiler
