#include "tessera/checkpoint/detail/checkpoint_source.h"

#include "tessera/base/detail/json.h"
#include "tessera/base/error.h"
#include "tessera/checkpoint/detail/distcp.h"
#include "tessera/checkpoint/folders.h"
#include "tessera/checkpoint/load.h"
#include "tessera/checkpoint/safetensors_file.h"

#include <algorithm>
#include <filesystem>
#include <set>
#include <unordered_map>

namespace tessera::dcp {
namespace {

namespace fs = std::filesystem;
constexpr const char* kIndexName = "model.safetensors.index.json";
constexpr const char* kShardingInfo = "DCP_SHARDING_INFO";

std::string read_text(const fs::path& path) {
  const MappedFile file(path.string(), "the contents of");
  const auto bytes = file.bytes();
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

// The global offsets of the shard that a file has of a tensor.
Sizes offsets_of(const Json& info, const TensorEntry& entry, const std::string& path) {
  const auto where = c10::str(path, ": ", kShardingInfo, " of '", entry.name, "'");
  const Json* found = info.find(entry.name);
  TESSERA_CHECK(found, UsageError, where, " is missing");
  std::vector<int64_t> offsets;
  try {
    offsets = found->at("saved_offsets").numbers();
  } catch (const UsageError& error) {
    TESSERA_FAIL(UsageError, where, ": ", error.what_without_backtrace());
  }
  int64_t end = 0;
  for (size_t d = 0; d < offsets.size() && offsets.size() == entry.shape.size(); d++)
    TESSERA_CHECK(offsets[d] >= 0 && !__builtin_add_overflow(offsets[d], entry.shape[d], &end), UsageError, where,
                  " has the invalid offset ", offsets[d]);
  TESSERA_CHECK(offsets.size() == entry.shape.size(), UsageError, where, " has ", offsets.size(), " offsets for ",
                entry.shape.size(), " dims");
  return Sizes(offsets.begin(), offsets.end());
}

// Builds a manifest from the headers of files.
class ManifestBuilder {
 public:
  explicit ManifestBuilder(std::string folder) : folder_(std::move(folder)) {}

  void add(const std::string& file) {
    const SafetensorsFile opened((fs::path(folder_) / file).string());
    const auto info = opened.header().metadata.find(kShardingInfo);
    Json offsets;
    if (info != opened.header().metadata.end())
      offsets = Json::parse(info->second, c10::str(opened.path(), ": ", kShardingInfo));
    for (const auto& entry : opened.header().tensors) {
      Box box = Box::full(entry.shape);
      if (info != opened.header().metadata.end()) box.offsets = offsets_of(offsets, entry, opened.path());
      add(entry, file, std::move(box));
    }
  }

  Manifest finish() && {
    for (const auto& tensor : manifest_.tensors) check_shards(tensor, folder_);
    return std::move(manifest_);
  }
  // Whether a file that was added has the tensor.
  bool has(const std::string& name, const std::string& file) const {
    const auto found = index_.find(name);
    if (found == index_.end()) return false;
    const auto& shards = manifest_.tensors[found->second].shards;
    return std::any_of(shards.begin(), shards.end(), [&](const auto& shard) { return shard.file == file; });
  }

 private:
  void add(const TensorEntry& entry, const std::string& file, Box box) {
    const auto [found, is_new] = index_.try_emplace(entry.name, manifest_.tensors.size());
    if (is_new) manifest_.tensors.push_back({entry.name, entry.dtype, Sizes(entry.shape.size(), 0), {}});
    auto& tensor = manifest_.tensors[found->second];
    TESSERA_CHECK(tensor.dtype == entry.dtype && tensor.sizes.size() == entry.shape.size(), UsageError, folder_, ": '",
                  entry.name, "' is ", tensor.dtype, " of ", tensor.sizes.size(), " dims in ",
                  is_new ? file : tensor.shards.front().file, " and ", entry.dtype, " of ", entry.shape.size(),
                  " dims in ", file);
    // Files do not state the global sizes: the tensor ends where its last shard ends.
    for (size_t d = 0; d < box.sizes.size(); d++) tensor.sizes[d] = std::max(tensor.sizes[d], box.end(d));
    tensor.shards.push_back({file, std::move(box), {}});
  }

  std::string folder_;
  Manifest manifest_;
  std::unordered_map<std::string, size_t> index_;
};

Manifest read_index(const std::string& folder) {
  const auto path = (fs::path(folder) / kIndexName).string();
  const auto json = Json::parse(read_text(path), path);
  const Json* map = json.find("weight_map");
  TESSERA_CHECK(map && map->get_if<Json::Object>(), UsageError, path, ": 'weight_map' is missing");
  std::set<std::string> files;
  for (const auto& [name, file] : map->members()) {
    const auto* text = file.get_if<std::string>();
    TESSERA_CHECK(text && !text->empty() && text->find('/') == std::string::npos, UsageError, path, ": '", name,
                  "' is mapped to ", file.dump(), ", which is not a file name in this folder");
    files.insert(*text);
  }
  ManifestBuilder builder(folder);
  for (const auto& file : files) builder.add(file);
  for (const auto& [name, file] : map->members())
    TESSERA_CHECK(builder.has(name, file.text()), UsageError, path, ": '", name, "' is mapped to ", file.text(),
                  ", but that file does not have it");
  return std::move(builder).finish();
}

Manifest read_headers(const std::string& folder) {
  std::set<std::string> files;
  for (const auto& entry : fs::directory_iterator(folder))
    if (entry.path().extension() == ".safetensors") files.insert(entry.path().filename().string());
  const auto steps = steps_in(folder);
  TESSERA_CHECK(!files.empty(), UsageError, "'", folder, "' is not a checkpoint: it has no ", kManifestName, ", no ",
                kIndexName, ", no *.safetensors file and no ", kDistcpMetadata,
                steps.empty() ? "" : c10::str("; did you mean '", steps.back().second, "'?"));
  ManifestBuilder builder(folder);
  for (const auto& file : files) builder.add(file);
  return std::move(builder).finish();
}

Manifest read_manifest(const std::string& folder) {
  const auto path = (fs::path(folder) / kManifestName).string();
  auto manifest = Manifest::parse(read_text(path), path);
  for (const auto& tensor : manifest.tensors) check_shards(tensor, path);
  return manifest;
}

}  // namespace

CheckpointSource open_source(const std::string& path) {
  std::error_code error;
  if (!fs::is_directory(path, error)) {
    TESSERA_CHECK(fs::exists(path, error), UsageError, "the checkpoint '", path, "' does not exist");
    ManifestBuilder builder(parent_folder(path));
    builder.add(fs::path(path).filename().string());
    return {parent_folder(path), std::move(builder).finish()};
  }
  if (fs::exists(fs::path(path) / kManifestName)) return {path, read_manifest(path)};
  if (fs::exists(fs::path(path) / kIndexName)) return {path, read_index(path)};
  if (fs::exists(fs::path(path) / kDistcpMetadata)) return {path, read_distcp(path)};
  return {path, read_headers(path)};
}

Values read_values(const std::string& path) {
  const auto manifest = fs::path(path) / kManifestName;
  if (fs::exists(fs::path(path) / kDistcpMetadata)) return read_distcp(path).values;
  return fs::exists(manifest) ? read_manifest(path).values : Values{};
}

}  // namespace tessera::dcp
