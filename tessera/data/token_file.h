#pragma once
#include "tessera/base/detail/mapped_file.h"
#include "tessera/data/dataset.h"

#include <iosfwd>

// Datasets from token files: text (one token per byte) or flat arrays of integers.
// Example:  auto file = std::make_shared<data::TokenFile>("train.bin");
//           auto [training, held_out] = data::token_windows(file, {.length = 256, .vocab_size = 50257});
namespace tessera::data {

// The format of a token file.
enum class TokenLayout : uint8_t {
  Auto,    // LlmC if the file has its header; an error for other *.bin files; else Text
  Text,    // one token per byte
  LlmC,    // llm.c: 256 int32 (magic, version, number of tokens, zeros), then uint16 for GPT-2 or uint32 for Llama 3
  Uint16,  // uint16 without header
  Uint32,  // uint32 without header
};
// Parses "auto", "text", "llm.c", "uint16" or "uint32". Throws UsageError for other text.
TokenLayout parse_token_layout(const std::string& text);
// Prints what parse_token_layout reads.
std::ostream& operator<<(std::ostream& out, TokenLayout layout);

// A memory-mapped token file.
class TokenFile {
 public:
  // Throws UsageError if the header is invalid or does not match the file size.
  explicit TokenFile(const std::string& path, TokenLayout layout = TokenLayout::Auto);

  // Number of tokens.
  int64_t size() const { return size_; }
  // The detected layout; never Auto.
  TokenLayout layout() const { return layout_; }
  // Reads tokens from `position` on. Throws UsageError, with its position, for a token that is not less than
  // vocab_size.
  void read(int64_t position, std::span<int64_t> tokens, int64_t vocab_size) const;

 private:
  void read_header();

  MappedFile file_;
  TokenLayout layout_;
  int64_t header_bytes_ = 0, token_bytes_ = 1, size_ = 0;
};

// Options of token_windows and all_windows.
struct WindowOptions {
  int64_t length = 256;      // tokens per sample
  int64_t vocab_size = 256;  // of the model; reading a larger token is an error
  double held_out = 0.05;    // fraction at the end of the file for validation
};

// Splits a file into consecutive samples. The last token of a sample is the first of the next: it is a target of the
// former and an input of the latter.
//
//   length 3:     a b c d e f g h          sample 0: a b c -> b c d     sample 1: d e f -> e f g        h is not used
//
// Throws UsageError if the file has fewer than two samples, because one of them is held out.
Split token_windows(std::shared_ptr<const TokenFile> file, const WindowOptions& options);
// The same without a held-out part.
std::shared_ptr<const Dataset> all_windows(std::shared_ptr<const TokenFile> file, const WindowOptions& options);

}  // namespace tessera::data
