#include "tessera/checkpoint/detail/disk.h"

#include "tessera/base/detail/system_error.h"
#include "tessera/base/error.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <filesystem>

namespace tessera::dcp {
namespace {

// Bytes of one write(). A larger one makes the kernel look for large blocks of free memory, which can take seconds.
constexpr size_t kWriteBytes = 256 << 10;
constexpr int64_t kFlushBytes = 2 << 20;

// The kernel grants a write lease only if no other descriptor or mapping of the file exists in any process.
bool is_open_only_here(int fd) {
  // The signal to a holder whose file is opened by another process. It is ignored by default; SIGIO ends the process.
  if (fcntl(fd, F_SETSIG, SIGURG) != 0 || fcntl(fd, F_SETLEASE, F_WRLCK) != 0) return false;
  return fcntl(fd, F_SETLEASE, F_UNLCK) == 0;
}

// Opens a file of at most `bytes` bytes to overwrite it in place. Removes it and returns -1 if that could change what
// somebody else reads.
int open_to_overwrite(const std::string& path, int64_t bytes) {
  const int fd = open(path.c_str(), O_WRONLY | O_NOFOLLOW | O_CLOEXEC);
  struct stat found {};
  if (fd >= 0 && fstat(fd, &found) == 0 && S_ISREG(found.st_mode) && found.st_nlink == 1 && is_open_only_here(fd) &&
      (found.st_size <= bytes || ftruncate(fd, bytes) == 0))
    return fd;
  if (fd >= 0) close(fd);
  unlink(path.c_str());
  return -1;
}

int open_new(const std::string& path, int64_t bytes, bool replace) {
  const int fd = replace ? open_to_overwrite(path, bytes) : -1;
  return fd >= 0 ? fd : open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
}

}  // namespace

NewFile::NewFile(std::string path, int64_t bytes, bool replace)
    : path_(std::move(path)), fd_(open_new(path_, bytes, replace)) {
  TESSERA_CHECK_ERRNO(fd_ >= 0, "cannot create the file '", path_, "'");
  // Blocks that are reserved at once are neighbours, and writes need not search for free ones.
  if (bytes == 0 || fallocate(fd_, FALLOC_FL_KEEP_SIZE, 0, bytes) == 0 || errno != ENOSPC) return;
  const int error = errno;
  close(std::exchange(fd_, -1));
  unlink(path_.c_str());
  raise_errno(error, c10::str("cannot write '", path_, "', which needs ", bytes, " bytes"));
}

NewFile::~NewFile() {
  if (fd_ >= 0) close(fd_);
}

void NewFile::write(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t written = ::write(fd_, bytes.data(), std::min(bytes.size(), kWriteBytes));
    if (written < 0 && errno == EINTR) continue;
    TESSERA_CHECK_ERRNO(written > 0, "cannot write '", path_, "'");
    written_ += written;
    bytes = bytes.subspan(static_cast<size_t>(written));
    if (written_ - flushed_ < kFlushBytes) continue;
    // The disk starts now, and not at the fsync, while the next bytes are copied and their checksum is computed.
    (void)sync_file_range(fd_, flushed_, written_ - flushed_, SYNC_FILE_RANGE_WRITE);
    flushed_ = written_;
  }
}

void NewFile::finish(bool sync) {
  const bool synced = !sync || fsync(fd_) == 0;
  const int error = errno;
  const bool closed = close(std::exchange(fd_, -1)) == 0;
  if (!synced) errno = error;
  TESSERA_CHECK_ERRNO(synced && closed, "cannot write '", path_, "'");
}

void write_file(const std::string& path, const std::string& text, bool sync) {
  NewFile file(path);
  file.write(std::as_bytes(std::span(text)));
  file.finish(sync);
}

void sync_folder(const std::string& path) {
  const int fd = open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  TESSERA_CHECK_ERRNO(fd >= 0, "cannot open the folder '", path, "'");
  const bool synced = fsync(fd) == 0 || errno == EINVAL;  // not every file system supports it
  const int error = errno;
  close(fd);
  if (!synced) raise_errno(error, c10::str("cannot write the folder '", path, "'"));
}

bool rename_folder(const std::string& from, const std::string& to, bool replace) {
  if (renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), RENAME_NOREPLACE) == 0) return false;
  if (errno == EINVAL && !std::filesystem::exists(to)) {  // the file system only supports rename()
    TESSERA_CHECK_ERRNO(std::rename(from.c_str(), to.c_str()) == 0, "cannot rename '", from, "' to '", to, "'");
    return false;
  }
  const int error = errno;
  const bool exists = error == EEXIST || error == ENOTEMPTY || std::filesystem::exists(to);
  if (!exists) raise_errno(error, c10::str("cannot rename '", from, "' to '", to, "'"));
  TESSERA_CHECK(replace, UsageError, "'", to, "' already exists; save under another name, or with {.overwrite = true}");
  TESSERA_CHECK(renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), RENAME_EXCHANGE) == 0, UsageError,
                "cannot replace '", to, "' by '", from, "' atomically: ", std::strerror(errno),
                "; save under another name");
  return true;
}

}  // namespace tessera::dcp
