#include "tessera/cli/paths.h"

#include <c10/core/DispatchKey.h>
#include <dlfcn.h>

namespace tessera::cli {

std::filesystem::path program_path() {
  std::error_code ignored;
  return std::filesystem::read_symlink("/proc/self/exe", ignored);
}

std::filesystem::path libtorch_path() {
  Dl_info info{};
  const char* (*function_in_libc10)(c10::DispatchKey) = &c10::toString;
  if (!dladdr(reinterpret_cast<void*>(function_in_libc10), &info) || !info.dli_fname) return {};
  return std::filesystem::weakly_canonical(info.dli_fname).parent_path().parent_path();
}

}  // namespace tessera::cli
