#pragma once
#include "tessera/base/detail/mapped_file.h"
#include "tessera/checkpoint/detail/checkpoint_source.h"
#include "tessera/checkpoint/safetensors_file.h"

#include <ATen/core/Tensor.h>

#include <map>
#include <memory>
#include <string>

namespace tessera::dcp {

// The values of the shards of a checkpoint, whatever its format. Files are mapped on first use.
class ShardReader {
 public:
  explicit ShardReader(std::string folder) : folder_(std::move(folder)) {}

  // The values of one shard. Read-only: shares the mapped memory where it can, and keeps it. Throws UsageError, with
  // the file, if it does not have this shard, and, with `verify`, if the checksum differs.
  at::Tensor read(const SavedTensor& tensor, const SavedShard& shard, bool verify);
  // All of a tensor, from its shards: a copy if it has several.
  at::Tensor read_all(const SavedTensor& tensor, bool verify);

 private:
  at::Tensor read_safetensors(const SavedTensor& tensor, const SavedShard& shard, bool verify);
  at::Tensor read_distcp(const SavedTensor& tensor, const SavedShard& shard);

  std::string folder_;
  std::map<std::string, SafetensorsFile> safetensors_;
  std::map<std::string, std::shared_ptr<const MappedFile>> archives_;
};

}  // namespace tessera::dcp
