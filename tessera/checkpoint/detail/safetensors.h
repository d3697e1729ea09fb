#pragma once
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

// The header of a .safetensors file, as text and as a value. No files here (safetensors_file.h).
//
//   length u64 | header, JSON | data                                                             little-endian
//   {"w": {"dtype":"F32", "shape":[2,3], "data_offsets":[0,24]}, "__metadata__": {"format":"pt"}}
//
// Tensors are row-major and lie back to back: no holes, no overlaps, from the first byte behind the header to the last
// of the file.
namespace tessera::dcp {

// "F32" and so on; nullopt, "" for what has no counterpart.
std::optional<c10::ScalarType> parse_dtype(std::string_view name);
std::string dtype_name(c10::ScalarType dtype);

struct TensorEntry {
  std::string name;
  c10::ScalarType dtype;
  std::vector<int64_t> shape;
  uint64_t begin = 0, end = 0;  // bytes of the data
  bool operator==(const TensorEntry&) const = default;
};

struct Header {
  std::vector<TensorEntry> tensors;             // in the order of their data
  std::map<std::string, std::string> metadata;  // of the file
  bool operator==(const Header&) const = default;
};

constexpr uint64_t kLongestHeader = 100'000'000;  // as Hugging Face's reader has it

// The header of a file of `file_bytes`, all of which came from elsewhere. Throws UsageError that begins with `file` and
// names the tensor, for a header that is cut off, no JSON, too long, or of tensors whose bytes are not their shape's,
// lie beyond the file, overlap or leave holes.
// Requires: `text` is the header alone.
Header parse_header(std::string_view text, uint64_t file_bytes, const std::string& file);

// Sets begin and end of the tensors, one behind the other, widest dtypes first so that each lies on a multiple of its
// own size, and gives length and header, with spaces to a multiple of 8 bytes.
std::string write_header(Header& header);

}  // namespace tessera::dcp
