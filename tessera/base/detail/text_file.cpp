#include "tessera/base/detail/text_file.h"

#include "tessera/base/detail/system_error.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>

namespace tessera {
namespace {

// Returns false with errno set if not all bytes were written.
bool write_all(int fd, std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t written = ::write(fd, bytes.data(), bytes.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return false;
    bytes.remove_prefix(static_cast<size_t>(written));
  }
  return true;
}

bool write_and_close(int fd, std::string_view bytes) {
  const bool written = write_all(fd, bytes);
  const int error = errno;
  const bool closed = close(fd) == 0;
  if (!written) errno = error;
  return written && closed;
}

}  // namespace

std::string read_text_file(const std::string& path, const std::string& what) {
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  TESSERA_CHECK_ERRNO(fd >= 0, "cannot read ", what, " '", path, "'");
  std::string text;
  char part[1 << 16];
  ssize_t count = 0;
  while ((count = ::read(fd, part, sizeof part)) > 0 || (count < 0 && errno == EINTR))
    if (count > 0) text.append(part, static_cast<size_t>(count));
  const int error = errno;
  close(fd);
  errno = error;
  TESSERA_CHECK_ERRNO(count == 0, "cannot read ", what, " '", path, "'");
  return text;
}

void write_text_file(const std::string& path, std::string_view text) {
  struct stat about {};
  const bool exists = stat(path.c_str(), &about) == 0;
  if (exists && !S_ISREG(about.st_mode)) {
    const int fd = open(path.c_str(), O_WRONLY | O_CLOEXEC);
    TESSERA_CHECK_ERRNO(fd >= 0 && write_and_close(fd, text), "cannot write '", path, "'");
    return;
  }
  // The target of a link is replaced, not the link.
  std::error_code ignored;
  const auto target = exists ? std::filesystem::canonical(path, ignored).string() : path;
  const auto draft = c10::str(target, ".", getpid(), ".tmp");
  const int fd = open(draft.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  TESSERA_CHECK_ERRNO(fd >= 0, "cannot write '", path, "'");
  if (write_and_close(fd, text) && std::rename(draft.c_str(), target.c_str()) == 0) return;
  const int error = errno;
  unlink(draft.c_str());
  raise_errno(error, c10::str("cannot write '", path, "'"));
}

AppendedFile::AppendedFile(std::string path, bool keep)
    : path_(std::move(path)),
      fd_(open(path_.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | (keep ? 0 : O_TRUNC), 0666)) {
  TESSERA_CHECK_ERRNO(fd_ >= 0, "cannot write '", path_, "'");
}

AppendedFile::~AppendedFile() { close(fd_); }

void AppendedFile::append(std::string_view text) {
  const off_t end = lseek(fd_, 0, SEEK_END);
  if (write_all(fd_, text)) return;
  const int error = errno;
  if (end >= 0) (void)!ftruncate(fd_, end);
  raise_errno(error, c10::str("cannot write '", path_, "'"));
}

}  // namespace tessera
