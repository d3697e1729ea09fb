#pragma once
#include <c10/core/Device.h>

#include <string>
#include <string_view>

namespace tessera::train {

// "NVIDIA H200"; empty for CPUs and unknown devices.
std::string device_name(at::Device device);
int64_t cuda_memory_bytes(at::Device device);  // 0: unknown

// The vendor's peak TFLOPS for dense matrix products in this precision; 0: unknown.
double known_peak_tflops(std::string_view device_name, std::string_view precision);

// What the MFU is a share of.
struct PeakRate {
  double tflops = 0;        // 0: unknown
  std::string source = {};  // "the peak of NVIDIA H200"
};
// Of a GPU the vendor's. Of a CPU the rate of LibTorch's products of 512 x 512 floats on this rank, which takes some 15
// ms to measure.
PeakRate peak_rate(at::Device device, std::string_view precision);

// Throws UsageError if this machine has no such device: "cuda" without a GPU or with a LibTorch for CPUs.
void check_device(const std::string& type);

// Bytes of memory: of the GPU; on CPU of this host, or of its control group if that is less. 0: unknown.
int64_t device_memory_bytes(at::Device device);

// Peak memory so far: reserved bytes of the device's caching allocator; on CPU the resident set size of the process.
double peak_memory_gib(at::Device device);

}  // namespace tessera::train
