#include "tessera/checkpoint/detail/safetensors.h"

#include "tessera/base/detail/json.h"
#include "tessera/base/error.h"

#include <c10/util/ArrayRef.h>

#include <algorithm>
#include <bit>
#include <cstring>

namespace tessera::dcp {
namespace {

struct DtypeName {
  const char* name;
  c10::ScalarType dtype;
};
// Complex, quantized and sub-byte dtypes have no counterpart.
constexpr DtypeName kDtypes[] = {
    {"BF16", c10::kBFloat16},
    {"BOOL", c10::kBool},
    {"F16", c10::kHalf},
    {"F32", c10::kFloat},
    {"F64", c10::kDouble},
    {"F8_E4M3", c10::kFloat8_e4m3fn},
    {"F8_E5M2", c10::kFloat8_e5m2},
    {"I16", c10::kShort},
    {"I32", c10::kInt},
    {"I64", c10::kLong},
    {"I8", c10::kChar},
    {"U16", c10::kUInt16},
    {"U32", c10::kUInt32},
    {"U64", c10::kUInt64},
    {"U8", c10::kByte},
};

constexpr std::string_view kMetadata = "__metadata__";

// The bytes of a tensor; none if the number overflows.
std::optional<uint64_t> tensor_bytes(const std::vector<int64_t>& shape, c10::ScalarType dtype) {
  auto bytes = static_cast<int64_t>(c10::elementSize(dtype));
  bool is_empty = false;
  for (const int64_t size : shape) {  // LibTorch counts an empty dim as 1 in strides, and these must not overflow
    if (size < 0 || __builtin_mul_overflow(bytes, std::max<int64_t>(size, 1), &bytes)) return std::nullopt;
    is_empty |= size == 0;
  }
  return is_empty ? 0 : static_cast<uint64_t>(bytes);
}

TensorEntry parse_entry(const std::string& name, const Json& json, const std::string& file) {
  try {
    TensorEntry entry{.name = name, .dtype = c10::kFloat, .shape = json.at("shape").numbers()};
    const auto& dtype = json.at("dtype").text();
    const auto known = parse_dtype(dtype);
    TESSERA_CHECK(known, UsageError, "dtype '", dtype, "' is not a dtype of LibTorch");
    entry.dtype = *known;
    const auto offsets = json.at("data_offsets").numbers();
    TESSERA_CHECK(offsets.size() == 2 && offsets[0] >= 0 && offsets[0] <= offsets[1], UsageError, "data_offsets are ",
                  c10::IntArrayRef(offsets), ", which is not a byte range [begin, end]");
    entry.begin = static_cast<uint64_t>(offsets[0]), entry.end = static_cast<uint64_t>(offsets[1]);
    const auto bytes = tensor_bytes(entry.shape, entry.dtype);
    TESSERA_CHECK(bytes == entry.end - entry.begin, UsageError, "it has ", entry.end - entry.begin, " bytes, and ",
                  dtype, c10::IntArrayRef(entry.shape), " needs ",
                  bytes ? c10::str(*bytes) : "an impossible number of bytes");
    return entry;
  } catch (const UsageError& error) {
    TESSERA_FAIL(UsageError, file, ": tensor '", name, "': ", error.what_without_backtrace());
  }
}

void check_layout(const std::vector<TensorEntry>& tensors, uint64_t data_bytes, const std::string& file) {
  uint64_t end = 0;
  for (const auto& tensor : tensors) {
    TESSERA_CHECK(tensor.begin == end, UsageError, file, ": tensor '", tensor.name, "' begins at byte ", tensor.begin,
                  " of the data, ",
                  tensor.begin < end ? "inside of the previous tensor, which ends at "
                                     : "which leaves a gap: the previous tensor ends at ",
                  end);
    end = tensor.end;
  }
  TESSERA_CHECK(end == data_bytes, UsageError, file, ": the tensors have ", end, " bytes, and ", data_bytes,
                " are in the file", end > data_bytes ? ": it is truncated" : "");
}

}  // namespace

std::optional<c10::ScalarType> parse_dtype(std::string_view name) {
  for (const auto& row : kDtypes)
    if (row.name == name) return row.dtype;
  return std::nullopt;
}

std::string dtype_name(c10::ScalarType dtype) {
  for (const auto& row : kDtypes)
    if (row.dtype == dtype) return row.name;
  return "";
}

Header parse_header(std::string_view text, uint64_t file_bytes, const std::string& file) {
  TESSERA_CHECK(!text.empty() && text.front() == '{', UsageError, file, ": the header does not begin with '{'");
  const auto json = Json::parse(text, c10::str(file, ": the header"));
  Header header;
  for (const auto& [name, value] : json.members()) {
    if (name != kMetadata) {
      header.tensors.push_back(parse_entry(name, value, file));
      continue;
    }
    TESSERA_CHECK(value.get_if<Json::Object>(), UsageError, file, ": ", kMetadata, " is not an object");
    for (const auto& [key, entry] : value.members()) {
      const auto* string = entry.get_if<std::string>();
      TESSERA_CHECK(string, UsageError, file, ": metadata '", key, "' is not a string");
      header.metadata.emplace(key, *string);
    }
  }
  std::stable_sort(header.tensors.begin(), header.tensors.end(),
                   [](const auto& a, const auto& b) { return std::pair(a.begin, a.end) < std::pair(b.begin, b.end); });
  check_layout(header.tensors, file_bytes - 8 - text.size(), file);
  return header;
}

std::string write_header(Header& header) {
  std::stable_sort(header.tensors.begin(), header.tensors.end(),
                   [](const auto& a, const auto& b) { return c10::elementSize(a.dtype) > c10::elementSize(b.dtype); });
  Json::Object entries;
  if (!header.metadata.empty()) {
    Json::Object metadata;
    for (const auto& [key, text] : header.metadata) metadata.emplace_back(key, text);
    entries.emplace_back(std::string(kMetadata), std::move(metadata));
  }
  uint64_t end = 0;
  for (auto& tensor : header.tensors) {
    const auto bytes = tensor_bytes(tensor.shape, tensor.dtype);
    TESSERA_CHECK(bytes && tensor.name != kMetadata && !dtype_name(tensor.dtype).empty(), InternalError,
                  "cannot write a safetensors entry for '", tensor.name, "'");
    tensor.begin = end, tensor.end = end += *bytes;
    const auto number = [](auto n) { return Json(static_cast<int64_t>(n)); };
    entries.emplace_back(tensor.name,
                         Json::Object{{"dtype", dtype_name(tensor.dtype)},
                                      {"shape", Json::Array(tensor.shape.begin(), tensor.shape.end())},
                                      {"data_offsets", Json::Array{number(tensor.begin), number(tensor.end)}}});
  }
  auto text = Json(std::move(entries)).dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');
  static_assert(std::endian::native == std::endian::little);
  std::string bytes(8, '\0');
  const uint64_t length = text.size();
  TESSERA_CHECK(length <= kLongestHeader, UsageError, "a safetensors header of ", length, " bytes for ",
                header.tensors.size(), " tensors exceeds the limit of readers, ", kLongestHeader);
  std::memcpy(bytes.data(), &length, 8);
  return bytes + text;
}

}  // namespace tessera::dcp
