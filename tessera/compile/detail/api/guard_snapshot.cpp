#include "tessera/compile/detail/api/guard_snapshot.h"

#include <algorithm>
#include <cstring>

namespace tessera::compiler {
namespace {

constexpr size_t kWord = sizeof(uint64_t);
constexpr size_t kLine = 64;  // bytes that the processor loads together

}  // namespace

void GuardSnapshot::add(const void* begin, size_t bytes) {
  if (bytes == 0) return;
  const auto first = reinterpret_cast<uintptr_t>(begin) / kWord,
             end = (reinterpret_cast<uintptr_t>(begin) + bytes - 1) / kWord + 1;
  const auto* words = reinterpret_cast<const uint64_t*>(first * kWord);  // NOLINT(performance-no-int-to-ptr)
  ranges_.push_back({words, end - first});
  words_.insert(words_.end(), words, words + (end - first));
}

bool GuardSnapshot::unchanged() const {
  using TwoWords = uint64_t __attribute__((vector_size(2 * kWord)));
  const auto difference_of = [](const uint64_t* a, const uint64_t* b) {
    TwoWords x, y;
    std::memcpy(&x, a, sizeof(x));
    std::memcpy(&y, b, sizeof(y));
    return x ^ y;
  };
  constexpr size_t kAhead = 16;  // ranges
  const auto prefetch = [&](size_t i) {
    const auto* begin = reinterpret_cast<const char*>(ranges_[i].begin);
    for (size_t at = 0; at < ranges_[i].words * kWord; at += kLine) __builtin_prefetch(begin + at);
  };
  for (size_t i = 0; i < std::min(kAhead, ranges_.size()); i++) prefetch(i);
  const auto* wanted = words_.data();
  for (size_t i = 0; i < ranges_.size(); i++) {
    if (i + kAhead < ranges_.size()) prefetch(i + kAhead);
    const auto [begin, words] = ranges_[i];
    TwoWords difference{};
    for (size_t w = 0; w + 1 < words; w += 2) difference |= difference_of(begin + w, wanted + w);
    if (words % 2 == 1) difference[0] |= begin[words - 1] ^ wanted[words - 1];
    if ((difference[0] | difference[1]) != 0) return false;
    wanted += words;
  }
  return !ranges_.empty();
}

}  // namespace tessera::compiler
