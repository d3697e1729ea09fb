#pragma once
#include "tessera/comm/backends.h"
#include "tessera/comm/detail/region/region.h"

#include <memory>
#include <string>

// Memory that processes of one machine share. It never has a name: its maker holds it open and says where
// (/proc/<pid>/fd/<n>), the others open that. However the processes end, nothing is left behind.
namespace tessera::comm::region {

class SharedMemory {
 public:
  // Zeros, all of it there from the start: a page that cannot be had later would be a SIGBUS in the middle of a
  // collective. Throws CommError.
  static SharedMemory make(size_t bytes);
  // What a process of the same user made; `path` is its path(). Throws CommError.
  static SharedMemory open(const std::string& path, size_t bytes);

  SharedMemory() = default;
  SharedMemory(SharedMemory&& other) noexcept { *this = std::move(other); }
  SharedMemory& operator=(SharedMemory&& other) noexcept;
  ~SharedMemory();

  char* data() const { return data_; }
  size_t size() const { return size_; }
  std::string path() const;  // only its maker's

 private:
  SharedMemory(int fd, size_t bytes);
  int fd_ = -1;
  char* data_ = nullptr;
  size_t size_ = 0;
};

// The same memory for all members of a group: its first rank makes it and puts the path into the store.
std::shared_ptr<Region> meet_in_shared_memory(const ConnectOptions& options, const Layout& layout);

}  // namespace tessera::comm::region
