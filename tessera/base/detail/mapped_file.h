#pragma once
#include <cstddef>
#include <span>
#include <string>

namespace tessera {

// A file's bytes as memory that the system reads in when it is looked at.
class MappedFile {
 public:
  // Throws UsageError for what is not there, is no plain file, cannot be read, or is empty. `what` is its subject, in
  // the plural: "the data" are empty.
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
