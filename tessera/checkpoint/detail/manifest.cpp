#include "tessera/checkpoint/detail/manifest.h"

#include "tessera/base/detail/json.h"
#include "tessera/base/error.h"
#include "tessera/checkpoint/detail/reshard.h"
#include "tessera/checkpoint/detail/safetensors.h"

#include <algorithm>

// The format on disk. The key "pieces" is from version 1 and stays, so that old checkpoints can be read.
//
// {"tessera_checkpoint":1,
//  "values":{"step":10},
//  "tensors":{"w":{"dtype":"F32","shape":[4,3],"pieces":[{"file":"shard-00001-model-00001-of-00001.safetensors",
//                                                         "offsets":[0,0],"sizes":[2,3],"crc32c":17}]}}}
namespace tessera::dcp {
namespace {

constexpr int64_t kVersion = 1;
constexpr const char* kShardsKey = "pieces";

Json array_of(const Sizes& sizes) { return Json::Array(sizes.begin(), sizes.end()); }

Sizes sizes_of(const Json& json) {
  Sizes sizes;
  for (const int64_t size : json.numbers()) {
    TESSERA_CHECK(size >= 0, UsageError, size, " is not a valid size or offset");
    sizes.push_back(size);
  }
  return sizes;
}

Json to_json(const SavedTensor& tensor) {
  Json::Array shards;
  for (const auto& shard : tensor.shards) {
    Json::Object fields{
        {"file", shard.file}, {"offsets", array_of(shard.box.offsets)}, {"sizes", array_of(shard.box.sizes)}};
    if (shard.checksum) fields.emplace_back("crc32c", static_cast<int64_t>(*shard.checksum));
    shards.emplace_back(std::move(fields));
  }
  return Json::Object{
      {"dtype", dtype_name(tensor.dtype)}, {"shape", array_of(tensor.sizes)}, {kShardsKey, std::move(shards)}};
}

SavedTensor parse_tensor(const std::string& name, const Json& json) {
  const auto dtype = parse_dtype(json.at("dtype").text());
  TESSERA_CHECK(dtype, UsageError, "dtype '", json.at("dtype").text(), "' is not a dtype of LibTorch");
  SavedTensor tensor{name, *dtype, sizes_of(json.at("shape")), {}};
  for (const auto& shard : json.at(kShardsKey).items()) {
    SavedShard saved{shard.at("file").text(), {sizes_of(shard.at("offsets")), sizes_of(shard.at("sizes"))}, {}};
    TESSERA_CHECK(saved.file.find('/') == std::string::npos, UsageError, "file '", saved.file,
                  "' is in another folder");
    TESSERA_CHECK(saved.box.offsets.size() == saved.box.sizes.size(), UsageError, "a shard has ",
                  saved.box.offsets.size(), " offsets and ", saved.box.sizes.size(), " sizes");
    if (const Json* checksum = shard.find("crc32c")) {
      saved.checksum = static_cast<uint32_t>(checksum->number());
      TESSERA_CHECK(*saved.checksum == checksum->number(), UsageError, "crc32c ", checksum->number(),
                    " does not have 32 bits");
    }
    tensor.shards.push_back(std::move(saved));
  }
  return tensor;
}

Value parse_value(const Json& json) {
  if (const auto* real = json.get_if<double>()) return *real;
  if (const auto* text = json.get_if<std::string>()) return *text;
  return json.number();
}

}  // namespace

const SavedTensor* Manifest::find(const std::string& name) const {
  const auto found = std::find_if(tensors.begin(), tensors.end(), [&](const auto& t) { return t.name == name; });
  return found == tensors.end() ? nullptr : &*found;
}

std::string Manifest::to_json() const {
  Json::Object json_values, json_tensors;
  for (const auto& [name, value] : values)
    json_values.emplace_back(name, std::visit([](const auto& v) { return Json(v); }, value));
  for (const auto& tensor : tensors) json_tensors.emplace_back(tensor.name, dcp::to_json(tensor));
  return Json(Json::Object{{"tessera_checkpoint", kVersion},
                           {"values", std::move(json_values)},
                           {"tensors", std::move(json_tensors)}})
      .dump();
}

Manifest Manifest::parse(const std::string& text, const std::string& what) {
  const auto json = Json::parse(text, what);
  std::string where = what;
  try {
    const int64_t version = json.at("tessera_checkpoint").number();
    TESSERA_CHECK(version == kVersion, UsageError, "the format version is ", version,
                  ", and this library reads version ", kVersion);
    Manifest manifest;
    for (const auto& [name, value] : json.at("values").members()) {
      where = c10::str(what, ": value '", name, "'");
      manifest.values.emplace(name, parse_value(value));
    }
    for (const auto& [name, tensor] : json.at("tensors").members()) {
      where = c10::str(what, ": tensor '", name, "'");
      manifest.tensors.push_back(parse_tensor(name, tensor));
    }
    return manifest;
  } catch (const UsageError& error) {
    TESSERA_FAIL(UsageError, where, ": ", error.what_without_backtrace());
  }
}

void check_shards(const SavedTensor& tensor, const std::string& where) {
  std::vector<Box> boxes;
  for (const auto& shard : tensor.shards) boxes.push_back(shard.box);
  const auto error = tiling_error(tensor.sizes, boxes);
  TESSERA_CHECK(error.empty(), UsageError, where, ": the shards of '", tensor.name, "' ",
                c10::IntArrayRef(tensor.sizes), " do not cover it exactly once: ", error);
}

}  // namespace tessera::dcp
