#include "tessera/cuda/detail/kernel.h"

#include "tessera/base/error.h"
#include "tessera/cuda/detail/result_cache.h"
#include "tessera/cuda/detail/stream.h"

#include <dlfcn.h>

#include <map>
#include <mutex>
#include <tuple>
#include <utility>

namespace tessera::cuda {
namespace {

// The part of cuda.h that is used here: the driver, which every machine with a GPU has.
struct Driver {
  int (*load)(void** module, const void* image);
  int (*function)(void** function, void* module, const char* name);
  int (*attribute)(int* value, int attribute, int device);
  int (*set)(void* function, int attribute, int value);
  int (*launch)(void* function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned shared_bytes,
                void* stream, void** arguments, void** extra);
  int (*error_text)(int, const char**);
};
constexpr int kComputeCapabilityMajor = 75, kComputeCapabilityMinor = 76;  // CUdevice_attribute
constexpr int kMaxDynamicSharedBytes = 8;                                  // CUfunction_attribute

const Driver* load_driver() {
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (!library) return nullptr;
  static Driver api;
  const auto find = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, name));
    return function != nullptr;
  };
  const bool found = find(api.load, "cuModuleLoadData") && find(api.function, "cuModuleGetFunction") &&
                     find(api.attribute, "cuDeviceGetAttribute") && find(api.set, "cuFuncSetAttribute") &&
                     find(api.launch, "cuLaunchKernel") && find(api.error_text, "cuGetErrorString");
  return found ? &api : nullptr;
}

const Driver* driver() {
  static const Driver* api = load_driver();
  return api;
}

void check_driver(int status, const char* what, const char* name) {
  if (status == 0) return;
  const char* text = "unknown error";
  driver()->error_text(status, &text);
  TESSERA_CHECK(false, SystemError, "the CUDA driver cannot ", what, " kernel ", name, ": ", text, " (", status, ")");
}

std::string architecture_of(c10::DeviceIndex device) {
  int major = 0, minor = 0;
  check_driver(driver()->attribute(&major, kComputeCapabilityMajor, device), "describe the device of", "");
  check_driver(driver()->attribute(&minor, kComputeCapabilityMinor, device), "describe the device of", "");
  const auto number = std::to_string(major) + std::to_string(minor);
  return "sm_" + number + (major >= 9 ? "a" : "");
}

// The compiled function. Modules live as long as the process: the driver frees them.
void* function_of(const char* source, const char* name, Rounding rounding, c10::DeviceIndex device,
                  int64_t shared_bytes) {
  static std::mutex mutex;
  static auto* modules = new std::map<std::pair<const char*, int>, void*>;
  static auto* functions = new std::map<std::tuple<const char*, std::string, int>, void*>;
  const std::lock_guard lock(mutex);
  auto& function = (*functions)[{source, name, device}];
  if (function) return function;
  auto& module = (*modules)[{source, device}];
  if (!module) {
    const auto architecture = architecture_of(device);
    const std::string kind = rounding == Rounding::Fused ? "cubin\n" : "cubin, separate rounding\n";
    const auto cubin = cached_result(kind + nvrtc_version() + "\n" + architecture + "\n" + source,
                                     [&] { return compile_to_cubin(source, architecture, rounding); });
    check_driver(driver()->load(&module, cubin.data()), "load", name);
  }
  check_driver(driver()->function(&function, module, name), "find", name);
  if (shared_bytes > 0)
    check_driver(driver()->set(function, kMaxDynamicSharedBytes, static_cast<int>(shared_bytes)),
                 "give shared memory to", name);
  return function;
}

}  // namespace

bool can_launch(c10::Device device) {
  return device.is_cuda() && built_with_cuda() && driver() != nullptr && nvrtc_available();
}

void Kernel::launch_with(c10::Device device, const LaunchShape& shape, void** arguments) const {
  TESSERA_CHECK(can_launch(device), UsageError, "kernel ", name_, " cannot be launched on ", device,
                ": it needs a GPU, its driver, and NVRTC");
  if (shape.blocks == 0) return;
  const auto dim = [](int64_t n) { return static_cast<unsigned>(n); };
  check_driver(driver()->launch(function_of(source_, name_, rounding_, device.index(), shape.shared_bytes),
                                dim(shape.blocks), 1, 1, dim(shape.threads), 1, 1, dim(shape.shared_bytes),
                                current_stream(device), arguments, nullptr),
               "launch", name_);
}

}  // namespace tessera::cuda
