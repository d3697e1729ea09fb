#include "tessera/compile/detail/codegen/kernel_key.h"

#include "tessera/base/detail/settings.h"
#include "tessera/base/error.h"
#include "tessera/compile/detail/codegen/private_files.h"

#include <c10/util/hash.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/random.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace tessera::compiler::codegen {
namespace {

constexpr size_t kSecretBytes = 32;
constexpr size_t kHashBlockBytes = 64;

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
  std::string secret(kSecretBytes, '\0');
  TESSERA_CHECK(getrandom(secret.data(), secret.size(), 0) == static_cast<ssize_t>(secret.size()), InternalError,
                "codegen: the kernel gave no random bytes");
  const auto temporary = c10::str(path, ".", getpid());
  unlink(temporary.c_str());  // of a process that was killed here
  write_private_file(temporary, secret);
  TESSERA_CHECK(rename(temporary.c_str(), path.c_str()) == 0, UsageError, "codegen: cannot create ", path, ": ",
                std::strerror(errno));
}

std::string bytes_of_hex(const std::string& hex) {
  std::string bytes;
  for (size_t i = 0; i + 1 < hex.size(); i += 2) bytes += static_cast<char>(std::stoi(hex.substr(i, 2), nullptr, 16));
  return bytes;
}

std::string padded_secret(const std::string& secret, char with) {
  auto padded = secret;
  padded.resize(kHashBlockBytes, '\0');
  std::transform(padded.begin(), padded.end(), padded.begin(), [&](char c) { return static_cast<char>(c ^ with); });
  return padded;
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
  const auto inner = bytes_of_hex(c10::sha1(padded_secret(secret_, 0x36) + bytes).str());
  return c10::sha1(padded_secret(secret_, 0x5c) + inner).str();
}

}  // namespace tessera::compiler::codegen
