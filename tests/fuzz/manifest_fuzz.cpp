// The manifest of a checkpoint: its text parses to the same manifest. Shards that pass check_shards() are a tiling.
#include "tessera/base/error.h"
#include "tessera/checkpoint/detail/manifest.h"
#include "tessera/checkpoint/detail/reshard.h"

#include "fuzz_targets.h"

namespace tessera::fuzz {
namespace {

bool shards_cover(const dcp::SavedTensor& tensor) {
  try {
    check_shards(tensor, "the input");
  } catch (const UsageError&) {
    return false;
  }
  return true;
}

}  // namespace

void fuzz_manifest(std::string_view input) {
  dcp::Manifest manifest;
  try {
    manifest = dcp::Manifest::parse(std::string(input), "the input");
  } catch (const UsageError&) {
    return;
  }
  const auto text = manifest.to_json();
  require(dcp::Manifest::parse(text, "what to_json() wrote") == manifest, "the text is another manifest: ", text);
  for (const auto& tensor : manifest.tensors) {
    if (!shards_cover(tensor)) continue;
    std::vector<dcp::Box> saved;
    for (const auto& shard : tensor.shards) saved.push_back(shard.box);
    const auto plan = dcp::reshard(saved, {dcp::Box::full(tensor.sizes)});
    require(plan.missing.empty(), "check_shards() accepts '", tensor.name, "', and elements are missing");
  }
}

}  // namespace tessera::fuzz
