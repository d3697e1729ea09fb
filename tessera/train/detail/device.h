#pragma once
#include <c10/core/Device.h>

#include <string>
#include <string_view>

namespace tessera::train {

// "NVIDIA H200"; empty for CPUs and unknown devices.
std::string device_name(at::Device device);

// The vendor's peak TFLOPS for dense matrix products in this precision; 0: unknown.
double known_peak_tflops(std::string_view device_name, std::string_view precision);

// Peak memory so far: reserved bytes of the device's caching allocator; on CPU the resident set size of the process.
double peak_memory_gib(at::Device device);

}  // namespace tessera::train
