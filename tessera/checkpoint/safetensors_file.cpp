#include "tessera/checkpoint/safetensors_file.h"

#include "tessera/base/detail/crc32c.h"
#include "tessera/base/error.h"
#include "tessera/checkpoint/detail/disk.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <cstring>

namespace tessera::dcp {
namespace {

constexpr size_t kPartBytes = 768 << 10;

std::span<const std::byte> byte_span(const at::Tensor& contiguous) {
  return {static_cast<const std::byte*>(contiguous.const_data_ptr()), contiguous.nbytes()};
}

}  // namespace

SafetensorsFile::SafetensorsFile(const std::string& path)
    : file_(std::make_shared<const MappedFile>(path, "the tensors")) {
  const auto bytes = file_->bytes();
  TESSERA_CHECK(bytes.size() >= 8, UsageError, path, ": ", bytes.size(), " bytes are too few for a safetensors file");
  uint64_t length = 0;
  std::memcpy(&length, bytes.data(), 8);
  TESSERA_CHECK(length <= kLongestHeader, UsageError, path, ": the first 8 bytes announce a header of ", length,
                " bytes; the limit is ", kLongestHeader);
  TESSERA_CHECK(length <= bytes.size() - 8, UsageError, path, ": the header has ", length, " bytes, and only ",
                bytes.size() - 8, " follow: the file is truncated");
  data_ = 8 + length;
  header_ = parse_header({reinterpret_cast<const char*>(bytes.data()) + 8, length}, bytes.size(), path);
  for (size_t i = 0; i < header_.tensors.size(); i++) index_.emplace(header_.tensors[i].name, i);
}

const TensorEntry* SafetensorsFile::find(const std::string& name) const {
  const auto found = index_.find(name);
  return found == index_.end() ? nullptr : &header_.tensors[found->second];
}

std::span<const std::byte> SafetensorsFile::bytes(const TensorEntry& entry) const {
  return file_->bytes().subspan(data_ + entry.begin, entry.end - entry.begin);
}

at::Tensor SafetensorsFile::tensor(const TensorEntry& entry) const {
  const auto bytes = this->bytes(entry);
  const bool aligned = reinterpret_cast<uintptr_t>(bytes.data()) % c10::elementSize(entry.dtype) == 0;
  if (!aligned || bytes.empty()) {
    auto copy = at::empty(entry.shape, entry.dtype);
    if (!bytes.empty()) std::memcpy(copy.mutable_data_ptr(), bytes.data(), bytes.size());
    return copy;
  }
  return at::from_blob(
      const_cast<std::byte*>(bytes.data()), entry.shape, [file = file_](void*) {}, at::TensorOptions(entry.dtype));
}

std::vector<uint32_t> write_safetensors(const std::string& path,
                                        const std::vector<std::pair<std::string, at::Tensor>>& tensors,
                                        const WriteOptions& options) {
  Header header{.tensors = {}, .metadata = options.metadata};
  std::unordered_map<std::string, size_t> index;
  for (const auto& [name, tensor] : tensors) {
    index.emplace(name, index.size());
    header.tensors.push_back({.name = name, .dtype = tensor.scalar_type(), .shape = tensor.sizes().vec()});
  }
  const auto start = write_header(header);  // sorts the tensors
  const uint64_t data_bytes = header.tensors.empty() ? 0 : header.tensors.back().end;
  NewFile file(path, static_cast<int64_t>(start.size() + data_bytes), options.replace);
  file.write(std::as_bytes(std::span(start)));
  std::vector<uint32_t> checksums(tensors.size());
  for (const auto& entry : header.tensors) {
    const size_t i = index.at(entry.name);
    const auto value = tensors[i].second.detach().cpu().contiguous();
    for (auto rest = byte_span(value); !rest.empty();) {  // parts that stay in the cache of the processor
      const auto part = rest.first(std::min(rest.size(), kPartBytes));
      checksums[i] = crc32c(part, checksums[i]);
      file.write(part);
      rest = rest.subspan(part.size());
    }
    if (options.after_each) options.after_each();
  }
  file.finish(options.sync);
  return checksums;
}

}  // namespace tessera::dcp
