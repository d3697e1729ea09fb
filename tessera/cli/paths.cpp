#include "tessera/cli/paths.h"

#include <c10/core/DispatchKey.h>
#include <dlfcn.h>

namespace tessera::cli {

std::filesystem::path program_path() {
  std::error_code none;
  return std::filesystem::read_symlink("/proc/self/exe", none);
}

std::filesystem::path libtorch_path() {
  Dl_info info{};
  const char* (*some_function)(c10::DispatchKey) = &c10::toString;  // lives in libc10.so
  if (!dladdr(reinterpret_cast<void*>(some_function), &info) || !info.dli_fname) return {};
  return std::filesystem::weakly_canonical(info.dli_fname).parent_path().parent_path();
}

}  // namespace tessera::cli
