#pragma once
#include "tessera/checkpoint/detail/box.h"

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <variant>
#include <vector>

namespace tessera::dcp {

// A value that is saved besides tensors: step, seed, names. Save numbers that JSON does not have (NaN) as text.
using Value = std::variant<int64_t, double, std::string>;
// Values by name.
using Values = std::map<std::string, Value>;

// Bytes of a file.
struct ByteRange {
  uint64_t begin = 0, size = 0;
  bool operator==(const ByteRange&) const = default;
};

// One box of a tensor in one file.
struct SavedShard {
  std::string file;                     // name in the checkpoint's folder
  Box box;                              // global indices
  std::optional<uint32_t> checksum;     // CRC-32C of its bytes
  std::optional<ByteRange> range = {};  // of a .distcp file: its archive
  bool operator==(const SavedShard&) const = default;
};

// Metadata of one tensor (DCP: TensorStorageMetadata).
struct SavedTensor {
  std::string name;  // in the state dict
  c10::ScalarType dtype;
  Sizes sizes;  // global
  std::vector<SavedShard> shards;
  bool operator==(const SavedTensor&) const = default;
};

// The metadata of a checkpoint (DCP: Metadata). It is written as tessera.json beside the data files. Without it, a
// missing last shard of a tensor would not be detected.
struct Manifest {
  Values values;
  std::vector<SavedTensor> tensors;  // in the order of the state dict

  const SavedTensor* find(const std::string& name) const;  // null if the tensor is missing
  // Throws UsageError for a value that is inf or NaN.
  std::string to_json() const;
  // Throws UsageError, which starts with `what`, for text that is not a manifest. check_shards() checks the shards.
  static Manifest parse(const std::string& text, const std::string& what);
  bool operator==(const Manifest&) const = default;
};
// File name of the manifest.
constexpr const char* kManifestName = "tessera.json";

// Throws UsageError unless the shards of a tensor contain each of its elements exactly once.
void check_shards(const SavedTensor& tensor, const std::string& where);

}  // namespace tessera::dcp
