// The file .metadata of a checkpoint of torch.distributed.checkpoint: the shards of an accepted one cover each tensor
// (check_shards), and each has a place in a file.
#include "tessera/base/error.h"
#include "tessera/checkpoint/detail/distcp.h"

#include "fuzz_targets.h"

#include <filesystem>
#include <fstream>

namespace tessera::fuzz {
namespace {

// A folder in memory with one file of values, as the metadata of the corpus name it. The caller writes the metadata.
struct DistcpFolder {
  std::string path = "/dev/shm/fuzz_distcp_XXXXXX";
  DistcpFolder() {
    require(mkdtemp(path.data()) != nullptr, "no temporary folder");
    dcp::Manifest values;
    values.values = {{"step", int64_t{3}}};
    dcp::write_distcp(values, path, {});
  }
  ~DistcpFolder() { std::filesystem::remove_all(path); }
};

}  // namespace

void fuzz_distcp(std::string_view input) {
  if (input.empty()) return;  // no file to map
  static const DistcpFolder folder;
  std::ofstream(folder.path + "/" + dcp::kDistcpMetadata, std::ios::binary) << input;
  try {
    for (const auto& tensor : dcp::read_distcp(folder.path).tensors) {
      int64_t covered = 0;
      for (const auto& shard : tensor.shards) {
        covered += shard.box.numel();
        require(shard.range.has_value() && !shard.file.empty(), tensor.name, " has a chunk without a place");
      }
      require(covered >= dcp::Box{Sizes(tensor.sizes.size()), tensor.sizes}.numel(), tensor.name, " is not covered");
    }
  } catch (const UsageError&) {
  }
}

}  // namespace tessera::fuzz
