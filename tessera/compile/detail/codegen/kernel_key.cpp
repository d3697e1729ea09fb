#include "tessera/compile/detail/codegen/kernel_key.h"

#include "tessera/base/detail/settings.h"
#include "tessera/base/error.h"
#include "tessera/comm/detail/store/sha256.h"
#include "tessera/compile/detail/codegen/private_files.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace tessera::compiler::codegen {
namespace {

constexpr size_t kSecretBytes = 32;

std::string state_folder() {
  if (setting_is_set("XDG_STATE_HOME")) return setting("XDG_STATE_HOME") + "/tessera";
  TESSERA_CHECK(setting_is_set("HOME"), UsageError,
                "codegen: the key of built kernels needs a folder; set HOME or XDG_STATE_HOME");
  return setting("HOME") + "/.local/state/tessera";
}

// Holds a lock on a folder, against other processes.
class FolderLock {
 public:
  explicit FolderLock(const std::string& folder) : fd_(open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC)) {
    TESSERA_CHECK(fd_ >= 0 && flock(fd_, LOCK_EX) == 0, UsageError, "codegen: cannot lock ", folder, ": ",
                  std::strerror(errno));
  }
  ~FolderLock() { close(fd_); }
  FolderLock(const FolderLock&) = delete;

 private:
  int fd_;
};

void create_key(const std::string& path) {
  const auto temporary = c10::str(path, ".", getpid());
  unlink(temporary.c_str());  // of a process that was killed here
  write_private_file(temporary, comm::store::random_bytes(kSecretBytes));
  TESSERA_CHECK(rename(temporary.c_str(), path.c_str()) == 0, UsageError, "codegen: cannot create ", path, ": ",
                std::strerror(errno));
}

}  // namespace

KernelKey KernelKey::of_user() {
  const auto folder = private_folder(state_folder(), "codegen: the folder of the kernel key");
  const auto path = folder + "/kernel_key";
  auto file = read_private_file(path);
  const auto is_missing = [&] { return !file.bytes && file.refused.empty(); };
  if (is_missing()) {
    const FolderLock lock(folder);
    file = read_private_file(path);  // another process can have created it
    if (is_missing()) create_key(path);
    file = read_private_file(path);
  }
  TESSERA_CHECK(file.bytes && file.bytes->size() == kSecretBytes, UsageError, "codegen: the key ", path,
                " of built kernels is not used: ",
                file.bytes ? c10::str("it has ", file.bytes->size(), " bytes, not ", kSecretBytes) : file.refused,
                "; delete it, and a new one is made");
  return KernelKey(std::move(*file.bytes));
}

std::string KernelKey::mac(const std::string& bytes) const {
  constexpr std::string_view kDigits = "0123456789abcdef";
  std::string text;
  for (const char c : comm::store::hmac_sha256(secret_, bytes)) {
    const auto byte = static_cast<unsigned char>(c);
    text += kDigits[byte >> 4];
    text += kDigits[byte & 15];
  }
  return text;
}

}  // namespace tessera::compiler::codegen
