#include "tessera/cuda/detail/nvrtc.h"

#include "tessera/base/error.h"

#include <c10/core/CPUAllocator.h>
#include <dlfcn.h>

#include <array>
#include <filesystem>
#include <vector>

namespace tessera::cuda {
namespace {

// The part of nvrtc.h that is used here. Its C interface is stable.
struct Nvrtc {
  using Program = struct NvrtcProgram*;
  int (*create)(Program*, const char* source, const char* name, int headers, const char* const*, const char* const*);
  int (*compile)(Program, int options, const char* const*);
  int (*log_size)(Program, size_t*);
  int (*log)(Program, char*);
  int (*cubin_size)(Program, size_t*);
  int (*cubin)(Program, char*);
  int (*destroy)(Program*);
  const char* (*error_text)(int);
  int (*version)(int* major, int* minor);
};

// NVIDIA's packages are installed beside torch.
std::vector<std::string> folders_of_packages() {
  Dl_info torch{};
  std::vector<std::string> folders = {""};
  if (dladdr(reinterpret_cast<void*>(&c10::GetCPUAllocator), &torch) == 0 || !torch.dli_fname) return folders;
  const auto packages = std::filesystem::path(torch.dli_fname).parent_path().parent_path().parent_path() / "nvidia";
  for (const auto* folder : {"cu13/lib", "cuda_nvrtc/lib"}) folders.push_back((packages / folder / "").string());
  return folders;
}

// NVRTC opens this library by its name alone, which the loader finds if it is loaded already.
void load_builtins(const std::string& folder) {
  std::error_code none;
  for (const auto& file : std::filesystem::directory_iterator(folder, none)) {
    const auto name = file.path().filename().string();
    if (name.starts_with("libnvrtc-builtins.so")) dlopen(file.path().c_str(), RTLD_NOW | RTLD_LOCAL);
  }
}

void* open_library() {
  for (const auto& folder : folders_of_packages()) {
    if (!folder.empty()) load_builtins(folder);
    for (const auto* name : {"libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"})
      if (void* library = dlopen((folder + name).c_str(), RTLD_NOW | RTLD_LOCAL)) return library;
  }
  return nullptr;
}

const Nvrtc* load_nvrtc() {
  void* library = open_library();
  if (!library) return nullptr;
  static Nvrtc api;
  const auto find = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, name));
    return function != nullptr;
  };
  const bool found = find(api.create, "nvrtcCreateProgram") && find(api.compile, "nvrtcCompileProgram") &&
                     find(api.log_size, "nvrtcGetProgramLogSize") && find(api.log, "nvrtcGetProgramLog") &&
                     find(api.cubin_size, "nvrtcGetCUBINSize") && find(api.cubin, "nvrtcGetCUBIN") &&
                     find(api.destroy, "nvrtcDestroyProgram") && find(api.error_text, "nvrtcGetErrorString") &&
                     find(api.version, "nvrtcVersion");
  return found ? &api : nullptr;
}

const Nvrtc* nvrtc() {
  static const Nvrtc* api = load_nvrtc();
  return api;
}

}  // namespace

bool nvrtc_available() { return nvrtc() != nullptr; }

std::string nvrtc_version() {
  int major = 0, minor = 0;
  if (const auto* api = nvrtc()) api->version(&major, &minor);
  return "NVRTC " + std::to_string(major) + "." + std::to_string(minor);
}

std::string compile_to_cubin(const std::string& source, const std::string& architecture, Rounding rounding) {
  const auto* api = nvrtc();
  TESSERA_CHECK(api, UsageError, "no libnvrtc.so.13 or .12 was found, which compiles kernels for a GPU; install the ",
                "package nvidia-cuda-nvrtc, or add its folder to LD_LIBRARY_PATH");
  Nvrtc::Program program = nullptr;
  std::string log, cubin;
  const auto check = [&](int status, const std::string& what) {
    TESSERA_CHECK(status == 0, UsageError, "NVRTC cannot ", what, " for ", architecture, ": ", api->error_text(status),
                  log.empty() ? "" : "\n", log);
  };
  check(api->create(&program, source.c_str(), "tessera.cu", 0, nullptr, nullptr), "create a program");
  const auto target = "--gpu-architecture=" + architecture;
  const std::array options = {target.c_str(), "--std=c++17", "--device-as-default-execution-space", "--device-int128",
                              rounding == Rounding::Fused ? "--fmad=true" : "--fmad=false"};
  const auto status = api->compile(program, static_cast<int>(options.size()), options.data());
  size_t size = 0;
  if (status != 0 && api->log_size(program, &size) == 0) {
    log.resize(size);
    api->log(program, log.data());
  }
  if (status == 0) {
    check(api->cubin_size(program, &size), "give the compiled kernels");
    cubin.resize(size);
    check(api->cubin(program, cubin.data()), "give the compiled kernels");
  }
  api->destroy(&program);
  check(status, "compile");
  return cubin;
}

}  // namespace tessera::cuda
