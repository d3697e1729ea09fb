#include "tessera/train/detail/device.h"

#include <cuda_runtime_api.h>

namespace tessera::train {

std::string device_name(at::Device device) {
  cudaDeviceProp properties;
  const bool known =
      device.is_cuda() && cudaGetDeviceProperties(&properties, device.has_index() ? device.index() : 0) == cudaSuccess;
  return known ? properties.name : "";
}

}  // namespace tessera::train
