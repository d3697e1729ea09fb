#pragma once
#include "tessera/comm/backends.h"
#include "tessera/comm/detail/region/region.h"

#include <memory>
#include <string>

// Memory that processes of one machine share. It never has a name in /dev/shm: the creator keeps a file descriptor open
// and the other processes open /proc/<pid>/fd/<n>. So nothing remains in /dev/shm, however the processes end.
namespace tessera::comm::region {

class SharedMemory {
 public:
  // Creates zeroed memory. All pages are allocated at once: a page that cannot be allocated later would raise SIGBUS in
  // the middle of a collective. Throws CommError.
  static SharedMemory make(size_t bytes);
  // Opens memory that another process of the same user created with make(); `path` is the path() there.
  // Throws CommError, also if the file belongs to another user, has a name, or can be opened by other users.
  static SharedMemory open(const std::string& path, size_t bytes);

  SharedMemory() = default;
  SharedMemory(SharedMemory&& other) noexcept { *this = std::move(other); }
  SharedMemory& operator=(SharedMemory&& other) noexcept;
  ~SharedMemory();

  char* data() const { return data_; }
  size_t size() const { return size_; }
  std::string path() const;  // valid in the creator only

 private:
  SharedMemory(int fd, size_t bytes);
  int fd_ = -1;
  char* data_ = nullptr;
  size_t size_ = 0;
};

// Connects the members of a group: rank 0 creates the memory and puts its path into the store.
std::shared_ptr<Region> connect_shared_region(const ConnectOptions& options, const RegionLayout& layout);

}  // namespace tessera::comm::region
