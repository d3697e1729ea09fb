#pragma once
#include "tessera/base/detail/mapped_file.h"
#include "tessera/data/dataset.h"

#include <iosfwd>

// Files of tokens, one behind the other: text, whose bytes are tokens, and flat arrays of integers.
namespace tessera::data {

enum class TokenLayout : uint8_t {
  Auto,    // a header of llm.c if there is one; else text, or for a file *.bin an error that asks
  Text,    // bytes
  LlmC,    // 256 int32 (magic, version, number of tokens, zeros), then uint16 for GPT-2, uint32 for Llama 3
  Uint16,  // no header
  Uint32,
};
TokenLayout parse_token_layout(const std::string& text);  // "auto", "text", "llm.c", "uint16", "uint32"; or UsageError
std::ostream& operator<<(std::ostream& out, TokenLayout layout);

class TokenFile {
 public:
  // Throws UsageError for a header that is not one, or that does not go with the file's size.
  explicit TokenFile(const std::string& path, TokenLayout layout = TokenLayout::Auto);

  int64_t size() const { return size_; }
  TokenLayout layout() const { return layout_; }  // as it was found; not Auto
  // Tokens from `position` on. UsageError for one that is not below `vocab_size`, with its position.
  void read(int64_t position, std::span<int64_t> tokens, int64_t vocab_size) const;

 private:
  void read_header();

  MappedFile file_;
  TokenLayout layout_;
  int64_t header_bytes_ = 0, token_bytes_ = 1, size_ = 0;
};

struct WindowOptions {
  int64_t length = 256;      // tokens of a sample
  int64_t vocab_size = 256;  // of the model; a larger token is an error when it is read
  double held_out = 0.05;    // the share at the end of the file that is not trained on
};

// A file cut into samples that lie side by side. The last token of each is the first of the next: it is a target here
// and an input there.
//
//   length 3:     a b c d e f g h          sample 0: a b c -> b c d     sample 1: d e f -> e f g        h is left over
//
// Throws UsageError if there are not two samples, one of them to hold out.
Split token_windows(std::shared_ptr<const TokenFile> file, const WindowOptions& options);
// The same without a part that is held out, for a file that is all of it.
std::shared_ptr<const Dataset> all_windows(std::shared_ptr<const TokenFile> file, const WindowOptions& options);

}  // namespace tessera::data
