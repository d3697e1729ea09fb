#pragma once
#include <string>

// NVRTC, NVIDIA's compiler library, compiles kernels at run time. It is loaded when it is first needed: Tessera has no
// link-time dependency on it, and kernels can be compiled on machines without a GPU.
namespace tessera::cuda {

// Can the library be loaded? It is looked for as LibTorch's wheel installs it and on the loader's path.
bool nvrtc_available();
std::string nvrtc_version();

// May the compiler fuse a product and a sum, which rounds once? Separate: the bits of code for a CPU without that.
enum class Rounding { Fused, Separate };

// Compiles CUDA C++ for an architecture, "sm_90a" for example, to a cubin. UsageError with the compiler's output.
// Functions without __global__ are for the device.
std::string compile_to_cubin(const std::string& source, const std::string& architecture,
                             Rounding rounding = Rounding::Fused);

}  // namespace tessera::cuda
