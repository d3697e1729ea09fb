#include "tessera/data/token_file.h"

#include "tessera/base/error.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <ostream>

namespace tessera::data {
namespace {

static_assert(std::endian::native == std::endian::little, "token files are little-endian");

constexpr int64_t kHeaderInts = 256;
constexpr int64_t kHeaderBytes = kHeaderInts * 4;
constexpr int64_t kLongestSample = int64_t{1} << 40;

struct HeaderFormat {
  int32_t magic, version;
  int64_t token_bytes;
  const char* name;
};
constexpr HeaderFormat kHeaders[] = {
    {20240520, 1, 2, "GPT-2"},
    {20240801, 7, 4, "Llama 3"},
};

struct LayoutName {
  TokenLayout layout;
  const char* name;
};
constexpr LayoutName kLayouts[] = {
    {TokenLayout::Auto, "auto"},     {TokenLayout::Text, "text"},     {TokenLayout::LlmC, "llm.c"},
    {TokenLayout::Uint16, "uint16"}, {TokenLayout::Uint32, "uint32"},
};

const HeaderFormat* header_format(int32_t magic) {
  for (const auto& format : kHeaders)
    if (format.magic == magic) return &format;
  return nullptr;
}

int32_t int_at(std::span<const std::byte> bytes, size_t i) {
  int32_t value = 0;
  std::memcpy(&value, bytes.data() + 4 * i, 4);
  return value;
}

TokenLayout detect_layout(const MappedFile& file) {
  const auto bytes = file.bytes();
  if (bytes.size() >= 4 && header_format(int_at(bytes, 0))) return TokenLayout::LlmC;
  TESSERA_CHECK(!file.path().ends_with(".bin"), UsageError, "the data '", file.path(),
                "' do not start with a header of llm.c; set the format with --data-format uint16, uint32 or text");
  return TokenLayout::Text;
}

class TokenWindows final : public Dataset {
 public:
  TokenWindows(std::shared_ptr<const TokenFile> file, const WindowOptions& options, int64_t first, int64_t count)
      : file_(std::move(file)), options_(options), first_(first), count_(count) {}

  int64_t samples() const override { return count_; }
  int64_t length() const override { return options_.length; }
  int64_t vocab_size() const override { return options_.vocab_size; }
  void read(int64_t sample, std::span<int64_t> input, std::span<int64_t> target) const override {
    const int64_t start = (first_ + sample) * options_.length;
    file_->read(start, input, options_.vocab_size);
    std::copy(input.begin() + 1, input.end(), target.begin());
    file_->read(start + options_.length, target.last(1), options_.vocab_size);
  }

 private:
  std::shared_ptr<const TokenFile> file_;
  WindowOptions options_;
  int64_t first_, count_;
};

int64_t windows_in(const TokenFile& file, const WindowOptions& options) {
  TESSERA_CHECK(options.length >= 1 && options.length <= kLongestSample, UsageError, "the sample length is ",
                options.length, " tokens; it must be from 1 to ", kLongestSample);
  return (file.size() - 1) / options.length;
}

}  // namespace

TokenLayout parse_token_layout(const std::string& text) {
  for (const auto& row : kLayouts)
    if (text == row.name) return row.layout;
  TESSERA_FAIL(UsageError, "unknown data format '", text, "'; write auto, text, llm.c, uint16 or uint32");
}

std::ostream& operator<<(std::ostream& out, TokenLayout layout) {
  for (const auto& row : kLayouts)
    if (layout == row.layout) return out << row.name;
  return out << "?";
}

TokenFile::TokenFile(const std::string& path, TokenLayout layout) : file_(path, "the data"), layout_(layout) {
  if (layout_ == TokenLayout::Auto) layout_ = detect_layout(file_);
  switch (layout_) {
    case TokenLayout::Auto:
    case TokenLayout::Text:
      break;
    case TokenLayout::LlmC:
      read_header();
      break;
    case TokenLayout::Uint16:
      token_bytes_ = 2;
      break;
    case TokenLayout::Uint32:
      token_bytes_ = 4;
      break;
  }
  const auto bytes = static_cast<int64_t>(file_.bytes().size()) - header_bytes_;
  TESSERA_CHECK(bytes % token_bytes_ == 0, UsageError, "the data '", path, "' have ", bytes,
                " bytes of tokens, which is not a multiple of the ", token_bytes_, " bytes per token of format ",
                layout_);
  TESSERA_CHECK(layout_ != TokenLayout::LlmC || size_ == bytes / token_bytes_, UsageError, "the header of '", path,
                "' announces ", size_, " tokens, and the file has ", bytes / token_bytes_, ": it is incomplete");
  size_ = bytes / token_bytes_;
  TESSERA_CHECK(size_ > 0, UsageError, "the data '", path, "' have a header and no tokens");
}

void TokenFile::read_header() {
  const auto bytes = file_.bytes();
  TESSERA_CHECK(static_cast<int64_t>(bytes.size()) >= kHeaderBytes, UsageError, "the data '", file_.path(), "' have ",
                bytes.size(), " bytes; a header of llm.c alone takes ", kHeaderBytes);
  const int32_t magic = int_at(bytes, 0), version = int_at(bytes, 1);
  const auto* format = header_format(magic);
  TESSERA_CHECK(format, UsageError, "the data '", file_.path(), "' start with ", magic,
                "; a header of llm.c starts with 20240520 (uint16) or 20240801 (uint32)");
  TESSERA_CHECK(version == format->version, UsageError, "the header of '", file_.path(), "' has version ", version,
                "; the version for ", format->name, " tokens is ", format->version);
  header_bytes_ = kHeaderBytes;
  token_bytes_ = format->token_bytes;
  size_ = int_at(bytes, 2);
}

void TokenFile::read(int64_t position, std::span<int64_t> tokens, int64_t vocab_size) const {
  const auto count = static_cast<int64_t>(tokens.size());
  TESSERA_CHECK(position >= 0 && position + count <= size_, InternalError, "tokens ", position, " to ",
                position + count, " of ", size_, " in ", file_.path());
  const std::byte* from = file_.bytes().data() + header_bytes_ + position * token_bytes_;
  for (int64_t i = 0; i < count; i++) {
    uint32_t token = 0;
    std::memcpy(&token, from + i * token_bytes_, static_cast<size_t>(token_bytes_));
    TESSERA_CHECK(token < vocab_size, UsageError, "token ", token, " at position ", position + i, " of '", file_.path(),
                  "' is beyond the model's vocabulary of ", vocab_size,
                  "; the file is for another vocabulary, or does not have format ", layout_);
    tokens[static_cast<size_t>(i)] = token;
  }
}

Split token_windows(std::shared_ptr<const TokenFile> file, const WindowOptions& options) {
  const int64_t all = windows_in(*file, options);
  TESSERA_CHECK(all >= 2, UsageError, "the data have ", file->size(), " tokens, and two samples of ", options.length,
                " (one of them held out) need ", 2 * options.length + 1, "; use a shorter --seq-len");
  TESSERA_CHECK(options.held_out > 0 && options.held_out < 1, UsageError, "the held-out fraction is ", options.held_out,
                "; it must be greater than 0 and less than 1");
  const auto wanted = static_cast<int64_t>(std::llround(options.held_out * static_cast<double>(all)));
  const int64_t held_out = std::clamp<int64_t>(wanted, 1, all - 1);
  return {std::make_shared<TokenWindows>(file, options, 0, all - held_out),
          std::make_shared<TokenWindows>(file, options, all - held_out, held_out)};
}

std::shared_ptr<const Dataset> all_windows(std::shared_ptr<const TokenFile> file, const WindowOptions& options) {
  const int64_t all = windows_in(*file, options);
  TESSERA_CHECK(all >= 1, UsageError, "the data have ", file->size(), " tokens, and a sample of ", options.length,
                " needs ", options.length + 1, "; use a shorter --seq-len");
  return std::make_shared<TokenWindows>(std::move(file), options, 0, all);
}

}  // namespace tessera::data
