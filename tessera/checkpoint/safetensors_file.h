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

// A .safetensors file to read from. Its header is checked; its data are memory that is read in when it is looked at.
class SafetensorsFile {
 public:
  // Throws UsageError for what MappedFile or parse_header refuses.
  explicit SafetensorsFile(const std::string& path);

  const std::string& path() const { return file_->path(); }
  const Header& header() const { return header_; }
  const TensorEntry* find(const std::string& name) const;  // nullptr if there is none
  std::span<const std::byte> bytes(const TensorEntry& entry) const;
  // The tensor, without a copy where it lies on a multiple of its element's size. It keeps the file alive; only to be
  // read.
  at::Tensor tensor(const TensorEntry& entry) const;

 private:
  std::shared_ptr<const MappedFile> file_;
  Header header_;
  size_t data_ = 0;  // where it begins
  std::unordered_map<std::string, size_t> index_;
};

struct WriteOptions {
  std::map<std::string, std::string> metadata = {};
  bool sync = true;  // on the disk when this returns, not only on its way there
  std::function<void()> after_each = {};
};
// Writes a new file, one tensor after the other, from any device, laid out in any way. Gives the checksum of each
// (crc32c of its bytes). Throws UsageError, with the file's name and what the system says, if it cannot: a disk that is
// full, a file that is there already.
std::vector<uint32_t> write_safetensors(const std::string& path,
                                        const std::vector<std::pair<std::string, at::Tensor>>& tensors,
                                        const WriteOptions& options = {});

}  // namespace tessera::dcp
