#include "tessera/base/detail/mapped_file.h"

#include "tessera/base/error.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace tessera {
namespace {

struct Descriptor {
  int fd;
  ~Descriptor() {
    if (fd >= 0) close(fd);
  }
};

}  // namespace

MappedFile::MappedFile(std::string path, const std::string& what) : path_(std::move(path)) {
  const Descriptor file{open(path_.c_str(), O_RDONLY | O_CLOEXEC)};
  TESSERA_CHECK(file.fd >= 0, UsageError, "cannot read ", what, " '", path_, "': ", std::strerror(errno));
  struct stat about {};
  TESSERA_CHECK(fstat(file.fd, &about) == 0 && S_ISREG(about.st_mode), UsageError, what, " '", path_,
                "' is not a regular file");
  TESSERA_CHECK(about.st_size > 0, UsageError, what, " '", path_, "' is empty");
  const auto size = static_cast<size_t>(about.st_size);
  void* start = mmap(nullptr, size, PROT_READ, MAP_PRIVATE, file.fd, 0);
  TESSERA_CHECK(start != MAP_FAILED, UsageError, "cannot map ", what, " '", path_, "': ", std::strerror(errno));
  bytes_ = {static_cast<const std::byte*>(start), size};
}

MappedFile::~MappedFile() {
  if (!bytes_.empty()) munmap(const_cast<std::byte*>(bytes_.data()), bytes_.size());
}

}  // namespace tessera
