#pragma once
#include "tessera/base/detail/mapped_file.h"
#include "tessera/checkpoint/detail/safetensors.h"

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <span>
#include <unordered_map>
#include <utility>

namespace tessera::dcp {

// A memory-mapped .safetensors file. The header is checked; tensor data is read from disk on first access.
// Example:  dcp::SafetensorsFile file("model.safetensors");  auto w = file.tensor(*file.find("w"));
class SafetensorsFile {
 public:
  // Throws UsageError if the file cannot be read or the header is invalid.
  explicit SafetensorsFile(const std::string& path);

  // The path of the file.
  const std::string& path() const { return file_->path(); }
  // The parsed header.
  const Header& header() const { return header_; }
  // The entry of a tensor; null if the file does not have it.
  const TensorEntry* find(const std::string& name) const;
  // The bytes of a tensor.
  std::span<const std::byte> bytes(const TensorEntry& entry) const;
  // The tensor. Shares the mapped memory if it is aligned to its element size, else it is a copy. It keeps the file
  // mapped. Read-only.
  at::Tensor tensor(const TensorEntry& entry) const;

 private:
  std::shared_ptr<const MappedFile> file_;
  Header header_;
  size_t data_ = 0;  // offset of the data
  std::unordered_map<std::string, size_t> index_;
};

// Options of write_safetensors().
struct WriteOptions {
  std::map<std::string, std::string> metadata = {};  // of the file
  bool sync = true;                                  // fsync before returning
  bool replace = false;                              // replaces an existing file
  std::function<void()> after_each = {};             // is called after each tensor
};
// Writes a file. Tensors may be on any device and have any strides. Returns the CRC-32C of each tensor's bytes.
// If it fails, throws with path and system error: UsageError, for example if the file exists, or SystemError, for
// example if the disk is full.
std::vector<uint32_t> write_safetensors(const std::string& path,
                                        const std::vector<std::pair<std::string, at::Tensor>>& tensors,
                                        const WriteOptions& options = {});

}  // namespace tessera::dcp
