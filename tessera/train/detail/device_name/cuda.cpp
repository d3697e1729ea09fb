#include "tessera/train/detail/device.h"

#include <cuda_runtime_api.h>

namespace tessera::train {

std::string device_name(at::Device device) {
  cudaDeviceProp properties;
  const bool known =
      device.is_cuda() && cudaGetDeviceProperties(&properties, device.has_index() ? device.index() : 0) == cudaSuccess;
  return known ? properties.name : "";
}

int64_t cuda_memory_bytes(at::Device device) {
  cudaDeviceProp properties;
  const bool known =
      device.is_cuda() && cudaGetDeviceProperties(&properties, device.has_index() ? device.index() : 0) == cudaSuccess;
  return known ? static_cast<int64_t>(properties.totalGlobalMem) : 0;
}

}  // namespace tessera::train
