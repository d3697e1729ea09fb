#pragma once
#include <c10/core/Device.h>

#include <string>
#include <string_view>

namespace tessera::train {

// "NVIDIA H200"; empty where nothing is known of it, as of processors.
std::string device_name(at::Device device);

// What makers state for matrices without sparsity, in fp32 or in a 16-bit precision; 0: not known.
double known_peak_tflops(std::string_view device_name, std::string_view precision);

// The most that was held so far: of the device what was reserved, of a processor the process's resident memory.
double peak_memory_gib(at::Device device);

}  // namespace tessera::train
