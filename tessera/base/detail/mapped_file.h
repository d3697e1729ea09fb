#pragma once
#include <cstddef>
#include <span>
#include <string>

namespace tessera {

// The bytes of a file, memory-mapped.
class MappedFile {
 public:
  // Throws UsageError if the file is missing, not regular, not readable or empty. `what` names it in messages: "data
  // file".
  MappedFile(std::string path, const std::string& what);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  std::span<const std::byte> bytes() const { return bytes_; }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
  std::span<const std::byte> bytes_;
};

}  // namespace tessera
