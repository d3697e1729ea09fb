#pragma once
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

// The header of a .safetensors file: parsing and printing. safetensors_file.h reads and writes files.
//
//   length u64 | header, JSON | data                                                             little-endian
//   {"w": {"dtype":"F32", "shape":[2,3], "data_offsets":[0,24]}, "__metadata__": {"format":"pt"}}
//
// Tensors are row-major and contiguous in the file: no gaps and no overlaps, from the first byte after the header to
// the end of the file.
namespace tessera::dcp {

// "F32" and so on. nullopt or "" for a dtype without counterpart.
std::optional<c10::ScalarType> parse_dtype(std::string_view name);
std::string dtype_name(c10::ScalarType dtype);

// One tensor in a header.
struct TensorEntry {
  std::string name;
  c10::ScalarType dtype;
  std::vector<int64_t> shape;
  uint64_t begin = 0, end = 0;  // byte range in the data
  bool operator==(const TensorEntry&) const = default;
};

// A parsed header.
struct Header {
  std::vector<TensorEntry> tensors;             // in the order of their data
  std::map<std::string, std::string> metadata;  // of the file
  bool operator==(const Header&) const = default;
};

constexpr uint64_t kLongestHeader = 100'000'000;  // the limit of Hugging Face's reader

// Parses the header of an untrusted file of `file_bytes`. Throws UsageError, which starts with `file` and names the
// tensor, if the header is truncated, too long or not JSON, if a byte range does not match its shape, and if ranges
// exceed the file, overlap or leave gaps.
// Requires: `text` is only the header.
Header parse_header(std::string_view text, uint64_t file_bytes, const std::string& file);

// Sets begin and end of the tensors, widest dtypes first, so that each one is aligned to its element size. Returns
// length and header, padded with spaces to a multiple of 8 bytes.
std::string write_header(Header& header);

}  // namespace tessera::dcp
