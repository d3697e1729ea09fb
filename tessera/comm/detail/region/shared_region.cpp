#include "tessera/comm/detail/region/shared_region.h"

#include "tessera/base/error.h"
#include "tessera/comm/detail/watch/store_wait.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <cerrno>
#include <cstring>
#include <utility>

namespace tessera::comm::region {
namespace {

constexpr const char* kFolder = "/dev/shm";

// A maker that leaves at once takes the way to the memory with it. It waits a moment for members that are on their way.
void let_all_come(Region& region) {
  const auto all = static_cast<uint32_t>(region.layout().ranks);
  for (int i = 0; i < 500 && region.header().mapped.load() < all && !region.poisoned(); i++) usleep(1000);
}

std::string mib(double bytes) { return c10::str(static_cast<int64_t>(bytes / (1 << 20) + 0.5), " MiB"); }

}  // namespace

SharedMemory::SharedMemory(int fd, size_t bytes) : fd_(fd), size_(bytes) {
  void* base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  TESSERA_CHECK(base != MAP_FAILED, CommError, "cannot map ", bytes, " bytes: ", std::strerror(errno));
  data_ = static_cast<char*>(base);
}

SharedMemory& SharedMemory::operator=(SharedMemory&& other) noexcept {
  std::swap(fd_, other.fd_);
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

SharedMemory::~SharedMemory() {
  if (data_) munmap(data_, size_);
  if (fd_ >= 0) close(fd_);
}

std::string SharedMemory::path() const { return c10::str("/proc/", getpid(), "/fd/", fd_); }

SharedMemory SharedMemory::make(size_t bytes) {
  const int fd = ::open(kFolder, O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
  TESSERA_CHECK(fd >= 0, CommError, "cannot make a shared memory object in ", kFolder, ": ", std::strerror(errno));
  SharedMemory closed_on_error;
  closed_on_error.fd_ = fd;
  int error = EINTR;
  while (error == EINTR) error = posix_fallocate(fd, 0, static_cast<off_t>(bytes));
  if (error != 0) {
    struct statvfs room {};
    statvfs(kFolder, &room);
    TESSERA_FAIL(CommError, "needs ", mib(static_cast<double>(bytes)), " of shared memory, but ", kFolder, " has ",
                 mib(static_cast<double>(room.f_bavail) * static_cast<double>(room.f_frsize)), " left (",
                 std::strerror(error), "); enlarge it (mount -o remount,size=1g ", kFolder,
                 ", or docker run --shm-size=1g)");
  }
  SharedMemory made(fd, bytes);
  closed_on_error.fd_ = -1;
  return made;
}

SharedMemory SharedMemory::open(const std::string& path, size_t bytes) {
  const int fd = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  TESSERA_CHECK(fd >= 0, CommError, "cannot open the shared memory ", path, ": ", std::strerror(errno),
                "; has the process that made it ended?");
  SharedMemory closed_on_error;
  closed_on_error.fd_ = fd;
  struct stat found {};
  TESSERA_CHECK(fstat(fd, &found) == 0 && static_cast<size_t>(found.st_size) == bytes, CommError, "shared memory ",
                path, " has ", found.st_size, " bytes instead of ", bytes,
                "; give all ranks the same TESSERA_SLOT_BYTES and TESSERA_STAGE_BYTES");
  SharedMemory opened(fd, bytes);
  closed_on_error.fd_ = -1;
  close(std::exchange(opened.fd_, -1));  // the mapping keeps it
  return opened;
}

std::shared_ptr<Region> meet_in_shared_memory(const ConnectOptions& options, const Layout& layout) {
  c10d::Store& store = *options.store;
  auto memory = std::make_shared<SharedMemory>();
  if (options.rank == 0) {
    std::string said;  // where it is, or "!" and the reason why there is none
    try {
      *memory = SharedMemory::make(layout.total());
      said = memory->path();
    } catch (const CommError& error) {
      said = c10::str("!", error.what_without_backtrace());
    }
    store.set("shm", std::vector<uint8_t>(said.begin(), said.end()));
  }
  const std::string said = watch::wait_for_key(store, "shm", options.timeout, options.lost);
  TESSERA_CHECK(!said.starts_with('!'), CommError, "group '", options.group, "' of ", options.size,
                " ranks: ", said.substr(1), ", or use backend gloo");
  if (options.rank != 0) try {
      *memory = SharedMemory::open(said, layout.total());
    } catch (const CommError& error) {
      TESSERA_FAIL(CommError, "the memory of group '", options.group, "' is made by rank ", options.ranks[0], ": ",
                   error.what_without_backtrace());
    }
  auto* region = new Region(memory->data(), layout, /*shared=*/true);
  region->header().mapped.fetch_add(1);
  return {region, [memory, maker = options.rank == 0](Region* region) {
            if (maker) let_all_come(*region);
            delete region;
          }};
}

}  // namespace tessera::comm::region
