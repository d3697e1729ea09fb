#include "tessera/checkpoint/detail/shard_reader.h"

#include "tessera/base/detail/crc32c.h"
#include "tessera/base/error.h"
#include "tessera/checkpoint/detail/distcp.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <filesystem>

namespace tessera::dcp {

at::Tensor ShardReader::read(const SavedTensor& tensor, const SavedShard& shard, bool verify) {
  return shard.range ? read_distcp(tensor, shard) : read_safetensors(tensor, shard, verify);
}

at::Tensor ShardReader::read_safetensors(const SavedTensor& tensor, const SavedShard& shard, bool verify) {
  auto known = safetensors_.find(shard.file);
  if (known == safetensors_.end())
    known =
        safetensors_.emplace(shard.file, SafetensorsFile((std::filesystem::path(folder_) / shard.file).string())).first;
  const auto& file = known->second;
  const auto* entry = file.find(tensor.name);
  TESSERA_CHECK(entry && entry->dtype == tensor.dtype && c10::IntArrayRef(entry->shape) == shard.box.sizes, UsageError,
                file.path(), ": '", tensor.name, "' ", shard.box, " of dtype ", tensor.dtype,
                " was saved in this file, and ",
                entry ? c10::str(entry->dtype, c10::IntArrayRef(entry->shape)) : std::string("no tensor of that name"),
                " is there now");
  if (verify && shard.checksum) {
    const uint32_t found = crc32c(file.bytes(*entry));
    TESSERA_CHECK(found == *shard.checksum, UsageError, file.path(), ": the bytes of '", entry->name, "' ", shard.box,
                  " are damaged: their checksum is ", found, ", and it was ", *shard.checksum);
  }
  return file.tensor(*entry);
}

at::Tensor ShardReader::read_distcp(const SavedTensor& tensor, const SavedShard& shard) {
  auto& file = archives_[shard.file];
  const auto path = (std::filesystem::path(folder_) / shard.file).string();
  if (!file) file = std::make_shared<const MappedFile>(path, "the tensors");
  const auto what = c10::str(path, ": '", tensor.name, "' ", shard.box);
  auto values = read_torch_archive(file, *shard.range, what);
  TESSERA_CHECK(values.scalar_type() == tensor.dtype && values.sizes() == c10::IntArrayRef(shard.box.sizes), UsageError,
                what, " of dtype ", tensor.dtype, " was saved in this file, and ", values.scalar_type(), values.sizes(),
                " is there now");
  return values;
}

at::Tensor ShardReader::read_all(const SavedTensor& tensor, bool verify) {
  const at::NoGradGuard no_grad;
  if (tensor.shards.size() == 1 && tensor.shards[0].box.sizes == tensor.sizes)
    return read(tensor, tensor.shards[0], verify);
  auto all = at::empty(tensor.sizes, at::TensorOptions(tensor.dtype));
  for (const auto& shard : tensor.shards) {
    auto part = all;
    for (size_t d = 0; d < tensor.sizes.size(); d++)
      part = part.narrow(static_cast<int64_t>(d), shard.box.offsets[d], shard.box.sizes[d]);
    part.copy_(read(tensor, shard, verify));
  }
  return all;
}

}  // namespace tessera::dcp
