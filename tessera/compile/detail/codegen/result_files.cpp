#include "tessera/compile/detail/codegen/result_files.h"

#include "tessera/base/detail/warn_once.h"
#include "tessera/base/error.h"
#include "tessera/compile/detail/codegen/kernel_key.h"
#include "tessera/compile/detail/codegen/kernel_library.h"
#include "tessera/compile/detail/codegen/private_files.h"
#include "tessera/cuda/detail/result_cache.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <filesystem>

namespace tessera::compiler::codegen {
namespace {

struct ResultFile {
  KernelKey key = KernelKey::of_user();
  std::string folder = private_folder(kernel_cache_folder(), "codegen: the kernel cache folder");
  std::string name, path;
  explicit ResultFile(const std::string& of) : name(key.mac("result\n" + of) + ".bin"), path(folder + "/" + name) {}
  std::string mac(const std::string& bytes) const { return key.mac(name + '\0' + bytes); }
};

void warn_unusable(const UsageError& error) {
  warn_once("codegen/results", c10::str("compiled kernels for GPUs are not kept: ", error.what_without_backtrace()));
}

}  // namespace

std::optional<std::string> read_result(const std::string& key) {
  try {
    const ResultFile file(key);
    const auto found = read_private_file(file.path);
    if (!found.bytes && found.refused.empty()) return {};
    const auto size = found.bytes ? found.bytes->size() : 0;
    const auto end = size - std::min(size, KernelKey::kMacDigits);
    if (size > KernelKey::kMacDigits && file.mac(found.bytes->substr(0, end)) == found.bytes->substr(end)) {
      utimensat(AT_FDCWD, file.path.c_str(), nullptr, 0);  // it was used now
      return found.bytes->substr(0, end);
    }
    warn_once("codegen/" + file.path,
              c10::str("codegen: ", file.path, " is damaged (",
                       found.refused.empty() ? "its checksum does not match" : found.refused, "); it is made again"));
    unlink(file.path.c_str());
  } catch (const UsageError& error) {
    warn_unusable(error);
  }
  return {};
}

void write_result(const std::string& key, const std::string& result) {
  static std::atomic<int64_t> count{0};
  try {
    const ResultFile file(key);
    const auto temporary = c10::str(file.path, ".", getpid(), ".", count++);
    write_private_file(temporary, result + file.mac(result));
    std::error_code failed;
    std::filesystem::rename(temporary, file.path, failed);
    if (failed) unlink(temporary.c_str());
    delete_least_used(file.folder, file.path);
  } catch (const UsageError& error) {
    warn_unusable(error);
  }
}

namespace {

const bool kCacheIsUsed = [] {
  cuda::use_result_cache({read_result, write_result});
  return true;
}();

}  // namespace

}  // namespace tessera::compiler::codegen
