#pragma once
#include "tessera/checkpoint/detail/manifest.h"

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <span>
#include <string>

namespace tessera {
class MappedFile;
}

// Checkpoints of torch.distributed.checkpoint as its FileSystemWriter writes them:
//
//   .metadata        a pickle of Metadata: sizes, dtype and chunks of each tensor, and the place of each chunk
//   __0_0.distcp     archives of torch.save, one after the other; one chunk or one Python object each
//
// Metadata and archives are read without executing anything (pickle.h).
namespace tessera::dcp {

// File name of the metadata.
constexpr const char* kDistcpMetadata = ".metadata";

// The tensors, with the byte range of each chunk, and as values the objects that are int, float, bool or str. Throws
// UsageError for anything that is not such a checkpoint.
Manifest read_distcp(const std::string& folder);

// The tensor of one archive. Shares the mapped memory where the alignment allows it. Throws UsageError, which starts
// with `what`.
at::Tensor read_torch_archive(const std::shared_ptr<const MappedFile>& file, ByteRange range, const std::string& what);

// Writes a new folder that Python's dcp.load reads: all tensors of `manifest` in one file per saved file, in its
// chunks. `read` returns the values of a chunk. Values are written as Python objects. Throws UsageError if a chunk has
// 4 GiB or more.
void write_distcp(const Manifest& manifest, const std::string& folder,
                  const std::function<at::Tensor(const SavedTensor&, const SavedShard&)>& read);

}  // namespace tessera::dcp
