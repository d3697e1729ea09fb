#include "tessera/cuda/detail/stream.h"

#include <c10/cuda/CUDAStream.h>

namespace tessera::cuda {

bool built_with_cuda() { return true; }

void* current_stream(c10::Device device) { return c10::cuda::getCurrentCUDAStream(device.index()).stream(); }

}  // namespace tessera::cuda
