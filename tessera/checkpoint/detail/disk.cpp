#include "tessera/checkpoint/detail/disk.h"

#include "tessera/base/error.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>

namespace tessera::dcp {

NewFile::NewFile(std::string path)
    : path_(std::move(path)), fd_(open(path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666)) {
  TESSERA_CHECK(fd_ >= 0, UsageError, "cannot create the file '", path_, "': ", std::strerror(errno));
}

NewFile::~NewFile() {
  if (fd_ >= 0) close(fd_);
}

void NewFile::write(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t written = ::write(fd_, bytes.data(), bytes.size());
    if (written < 0 && errno == EINTR) continue;
    TESSERA_CHECK(written > 0, UsageError, "cannot write '", path_, "': ", std::strerror(errno));
    bytes = bytes.subspan(static_cast<size_t>(written));
  }
}

void NewFile::finish(bool sync) {
  const bool synced = !sync || fsync(fd_) == 0;
  const int error = errno;
  const bool closed = close(std::exchange(fd_, -1)) == 0;
  TESSERA_CHECK(synced && closed, UsageError, "cannot write '", path_, "': ", std::strerror(synced ? errno : error));
}

void write_file(const std::string& path, const std::string& text, bool sync) {
  NewFile file(path);
  file.write(std::as_bytes(std::span(text)));
  file.finish(sync);
}

void sync_folder(const std::string& path) {
  const int fd = open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  TESSERA_CHECK(fd >= 0, UsageError, "cannot open the folder '", path, "': ", std::strerror(errno));
  const bool synced = fsync(fd) == 0 || errno == EINVAL;  // not every file system supports it
  const int error = errno;
  close(fd);
  TESSERA_CHECK(synced, UsageError, "cannot write the folder '", path, "': ", std::strerror(error));
}

bool rename_folder(const std::string& from, const std::string& to, bool replace) {
  if (renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), RENAME_NOREPLACE) == 0) return false;
  if (errno == EINVAL && !std::filesystem::exists(to)) {  // the file system only supports rename()
    TESSERA_CHECK(std::rename(from.c_str(), to.c_str()) == 0, UsageError, "cannot rename '", from, "' to '", to,
                  "': ", std::strerror(errno));
    return false;
  }
  const bool exists = errno == EEXIST || errno == ENOTEMPTY || std::filesystem::exists(to);
  TESSERA_CHECK(exists, UsageError, "cannot rename '", from, "' to '", to, "': ", std::strerror(errno));
  TESSERA_CHECK(replace, UsageError, "'", to, "' already exists; save under another name, or with {.overwrite = true}");
  TESSERA_CHECK(renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), RENAME_EXCHANGE) == 0, UsageError,
                "cannot replace '", to, "' by '", from, "' atomically: ", std::strerror(errno),
                "; save under another name");
  return true;
}

}  // namespace tessera::dcp
