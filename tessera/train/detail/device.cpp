#include "tessera/train/detail/device.h"

#include "tessera/base/error.h"

#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <limits>

namespace tessera::train {
namespace {

struct DevicePeak {
  const char* part_of_name;
  double half_tflops, fp32_tflops;
};
// The first entry whose name is a part of the device name counts.
constexpr DevicePeak kPeaks[] = {
    {"B200", 2250, 75},  {"H200", 989, 67},       {"H100 NVL", 835, 60},  {"H100 PCIe", 756, 51},
    {"H100", 989, 67},   {"A100", 312, 19.5},     {"L40S", 362, 91.6},    {"A10G", 70, 31.2},
    {"V100", 125, 15.7}, {"RTX 4090", 165, 82.6}, {"RTX 3090", 71, 35.6}, {"T4", 65, 8.1},
};

}  // namespace

double known_peak_tflops(std::string_view device_name, std::string_view precision) {
  for (const auto& peak : kPeaks)
    if (device_name.find(peak.part_of_name) != std::string_view::npos)
      return precision == "fp32" ? peak.fp32_tflops : peak.half_tflops;
  return 0;
}

PeakRate peak_rate(at::Device device, std::string_view precision) {
  if (!device.is_cpu())
    return {known_peak_tflops(device_name(device), precision), "the peak of " + device_name(device)};
  constexpr int64_t kSize = 512;
  const at::NoGradGuard no_grad;
  const auto a = at::ones({kSize, kSize}), b = at::ones({kSize, kSize});
  auto product = at::mm(a, b);
  double best = std::numeric_limits<double>::infinity();
  for (int i = 0; i < 4; i++) {
    const auto start = std::chrono::steady_clock::now();
    at::mm_out(product, a, b);
    best = std::min(best, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  return {2.0 * kSize * kSize * kSize / best / 1e12, "the fastest product of 512 x 512 floats measured on a rank"};
}

void check_device(const std::string& type) {
  TESSERA_CHECK(type != "cuda" || at::globalContext().hasCUDA(), UsageError,
                "training.device is cuda, but LibTorch finds no CUDA device: it is built for CPUs, or this host has no "
                "usable GPU; use --device cpu");
}

int64_t device_memory_bytes(at::Device device) {
  if (!device.is_cpu()) return cuda_memory_bytes(device);
  const int64_t host = sysconf(_SC_PHYS_PAGES) * sysconf(_SC_PAGE_SIZE);
  int64_t limit = 0;
  std::ifstream("/sys/fs/cgroup/memory.max") >> limit;  // "max" if it is not limited
  return limit > 0 ? std::min(host, limit) : host;
}

double peak_memory_gib(at::Device device) {
  constexpr double kGib = 1 << 30;
  if (!device.is_cpu()) {
    const auto stats = c10::getDeviceAllocator(device.type())->getDeviceStats(device.has_index() ? device.index() : 0);
    constexpr auto kAll = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
    return static_cast<double>(stats.reserved_bytes[kAll].peak) / kGib;
  }
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<double>(usage.ru_maxrss) * 1024 / kGib;
}

}  // namespace tessera::train
