#pragma once
#include "tessera/cuda/detail/nvrtc.h"

#include <c10/core/Device.h>

#include <array>
#include <cstdint>
#include <string>

// Kernels that are compiled at run time, launched on the current stream of a device.
namespace tessera::cuda {

// Can kernels be compiled and launched on this device? False for a CPU and for a build without CUDA.
bool can_launch(c10::Device device);

struct LaunchShape {
  int64_t blocks = 1;
  int64_t threads = 256;  // per block
  int64_t shared_bytes = 0;
};

class Kernel {
 public:
  // `source`: CUDA C++ with `extern "C" __global__ void name(...)`. Compiled when it is first used on a device.
  Kernel(const char* source, const char* name, Rounding rounding = Rounding::Fused)
      : source_(source), name_(name), rounding_(rounding) {}

  // The arguments must have exactly the types of the kernel's parameters.
  template <class... Args>
  void launch(c10::Device device, const LaunchShape& shape, Args... args) const {
    std::array<void*, sizeof...(Args)> addresses{static_cast<void*>(&args)...};
    launch_with(device, shape, addresses.data());
  }

 private:
  void launch_with(c10::Device device, const LaunchShape& shape, void** arguments) const;
  const char* source_;
  const char* name_;
  Rounding rounding_;
};

}  // namespace tessera::cuda
