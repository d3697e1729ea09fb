#include "tessera/base/error.h"
#include "tessera/cuda/detail/matmul.h"

namespace tessera::cuda {

void matmul(const MatmulArgs&) { TESSERA_FAIL(InternalError, "cuda::matmul in a build without CUDA"); }

}  // namespace tessera::cuda
