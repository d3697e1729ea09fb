#pragma once
#include "tessera/checkpoint/detail/manifest.h"

#include <string>

namespace tessera::dcp {

// A checkpoint that tensors can be loaded from.
struct CheckpointSource {
  std::string folder;  // of the data files
  Manifest manifest;
};

// Reads the metadata of a checkpoint, without tensor data. `path` is one of:
//
//   a folder with tessera.json                    written by save()
//   a folder with model.safetensors.index.json    of Hugging Face: the files that the index names
//   a folder with .metadata and *.distcp          of torch.distributed.checkpoint (distcp.h)
//   a folder with *.safetensors                   all of them; files of DCP have the offsets of each shard as metadata
//   a file                                        one .safetensors file
//
// Throws UsageError for anything else, for invalid headers (safetensors.h), and for shards that overlap or do not
// cover their tensor.
CheckpointSource open_source(const std::string& path);

}  // namespace tessera::dcp
