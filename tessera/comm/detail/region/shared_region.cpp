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

// When the creator closes its file descriptor, no other process can open the memory. So it first waits for members that
// have not mapped the memory yet, for half a second at most.
void wait_for_members(Region& region) {
  const auto all = static_cast<uint32_t>(region.layout().ranks);
  for (int i = 0; i < 500 && region.header().mapped.load() < all && !region.aborted(); i++) usleep(1000);
}

// The path came through a store. Memory of make() belongs to this user, has no name, and no other user can open it.
// Anything else is not ours, whoever put its path there.
void check_is_private(int fd, const std::string& path) {
  struct stat found {};
  TESSERA_CHECK(fstat(fd, &found) == 0, CommError, "cannot inspect the shared memory ", path, ": ",
                std::strerror(errno));
  std::string wrong;
  if (!S_ISREG(found.st_mode))
    wrong = "is not a file in memory";
  else if (found.st_uid != geteuid())
    wrong = c10::str("belongs to user ", found.st_uid, ", not to user ", geteuid());
  else if (found.st_nlink != 0)
    wrong = "has a name in a folder";
  else if ((found.st_mode & 07777) != 0600)
    wrong = "can be opened by other users";
  TESSERA_CHECK(wrong.empty(), CommError, "the shared memory ", path, " ", wrong,
                ". It was not created by a rank of this job: another process may have changed the store");
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
  TESSERA_CHECK(fd >= 0, CommError, "cannot create shared memory in ", kFolder, ": ", std::strerror(errno));
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
  const int fd = ::open(path.c_str(), O_RDWR | O_CLOEXEC | O_NONBLOCK);  // a FIFO or a device must not block
  TESSERA_CHECK(fd >= 0, CommError, "cannot open the shared memory ", path, ": ", std::strerror(errno),
                "; has the process that created it ended?");
  SharedMemory closed_on_error;
  closed_on_error.fd_ = fd;
  check_is_private(fd, path);
  struct stat found {};
  TESSERA_CHECK(fstat(fd, &found) == 0 && static_cast<size_t>(found.st_size) == bytes, CommError, "shared memory ",
                path, " has ", found.st_size, " bytes instead of ", bytes,
                "; give all ranks the same TESSERA_SLOT_BYTES and TESSERA_STAGE_BYTES");
  SharedMemory opened(fd, bytes);
  closed_on_error.fd_ = -1;
  close(std::exchange(opened.fd_, -1));  // the mapping keeps the memory
  return opened;
}

std::shared_ptr<Region> connect_shared_region(const ConnectOptions& options, const RegionLayout& layout) {
  c10d::Store& store = *options.store;
  auto memory = std::make_shared<SharedMemory>();
  if (options.rank == 0) {
    std::string published;  // the path, or "!" and an error message
    try {
      *memory = SharedMemory::make(layout.total());
      published = memory->path();
    } catch (const CommError& error) {
      published = c10::str("!", error.what_without_backtrace());
    }
    store.set("shm", std::vector<uint8_t>(published.begin(), published.end()));
  }
  const std::string path = watch::wait_for_key(store, "shm", options.timeout, options.lost);
  TESSERA_CHECK(!path.starts_with('!'), CommError, "group '", options.group, "' of ", options.size,
                " ranks: ", path.substr(1), ", or use backend gloo");
  if (options.rank != 0) try {
      *memory = SharedMemory::open(path, layout.total());
    } catch (const CommError& error) {
      TESSERA_FAIL(CommError, "rank ", options.ranks[0], " created the shared memory of group '", options.group,
                   "': ", error.what_without_backtrace());
    }
  auto* region = new Region(memory->data(), layout, /*shared=*/true);
  region->header().mapped.fetch_add(1);
  return {region, [memory, is_creator = options.rank == 0](Region* region) {
            if (is_creator) wait_for_members(*region);
            delete region;
          }};
}

}  // namespace tessera::comm::region
