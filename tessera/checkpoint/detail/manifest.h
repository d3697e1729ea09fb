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

// What a checkpoint has beside tensors: step, seed, names. A number that JSON has not (nan) is kept as a text.
using Value = std::variant<int64_t, double, std::string>;
using Values = std::map<std::string, Value>;

struct SavedPiece {
  std::string file;  // in the checkpoint's folder
  Box box;
  std::optional<uint32_t> checksum;  // crc32c of its bytes
  bool operator==(const SavedPiece&) const = default;
};

struct SavedTensor {
  std::string name;
  c10::ScalarType dtype;
  Sizes sizes;  // global
  std::vector<SavedPiece> pieces;
  bool operator==(const SavedTensor&) const = default;
};

// All that is in a checkpoint but the data. Written beside them as tessera.json, for the files alone do not say how
// large a tensor is whose last piece is lost.
struct Manifest {
  Values values;
  std::vector<SavedTensor> tensors;  // in the order of the dict

  const SavedTensor* find(const std::string& name) const;  // nullptr if there is none
  // Throws UsageError for a value that is inf or nan.
  std::string to_json() const;
  // Throws UsageError that begins with `what` for what is no manifest. Whether pieces fit together is check_pieces' to
  // say.
  static Manifest parse(const std::string& text, const std::string& what);
  bool operator==(const Manifest&) const = default;
};
constexpr const char* kManifestName = "tessera.json";

// Throws UsageError if the pieces of a tensor do not have each of its elements once.
void check_pieces(const SavedTensor& tensor, const std::string& where);

}  // namespace tessera::dcp
