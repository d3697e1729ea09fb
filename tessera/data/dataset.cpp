#include "tessera/data/dataset.h"

namespace tessera::data {

// Byte tokens as characters, other tokens as numbers.
std::string Dataset::show(std::span<const int64_t> tokens) const {
  std::string text;
  for (const int64_t token : tokens) {
    if (vocab_size() <= 256)
      text += static_cast<char>(token);
    else
      text += (text.empty() ? "" : " ") + std::to_string(token);
  }
  return text;
}

}  // namespace tessera::data
