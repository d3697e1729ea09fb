#pragma once
#include <c10/core/Device.h>

// What needs CUDA's headers. stream/cuda.cpp in a build with TESSERA_CUDA, else stream/no_cuda.cpp.
namespace tessera::cuda {

bool built_with_cuda();
void* current_stream(c10::Device device);  // a CUstream

}  // namespace tessera::cuda
