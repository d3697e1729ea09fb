#include "tessera/data/detail/permutation.h"

#include "tessera/base/error.h"
#include "tessera/data/detail/splitmix64.h"

namespace tessera::data {

Permutation::Permutation(int64_t size, uint64_t key) : size_(size), key_(splitmix64(key)) {
  TESSERA_CHECK(size >= 1, UsageError, "the size of a permutation is ", size, "; it must be at least 1");
  while (half_bits_ < 31 && (uint64_t{1} << (2 * half_bits_)) < static_cast<uint64_t>(size)) half_bits_++;
  TESSERA_CHECK((uint64_t{1} << (2 * half_bits_)) >= static_cast<uint64_t>(size), UsageError,
                "the size of a permutation is ", size, "; it must be at most 2^62");
}

int64_t Permutation::operator()(int64_t i) const {
  TESSERA_CHECK(i >= 0 && i < size_, UsageError, "index ", i, " of a permutation of size ", size_);
  auto x = static_cast<uint64_t>(i);
  do {
    x = scramble(x);
  } while (x >= static_cast<uint64_t>(size_));
  return static_cast<int64_t>(x);
}

uint64_t Permutation::scramble(uint64_t x) const {
  constexpr uint64_t kRounds = 6;
  const uint64_t mask = (uint64_t{1} << half_bits_) - 1;
  uint64_t left = x >> half_bits_, right = x & mask;
  for (uint64_t round = 0; round < kRounds; round++) {
    const uint64_t next = left ^ (splitmix64(key_ + round, right) & mask);
    left = right;
    right = next;
  }
  return left << half_bits_ | right;
}

}  // namespace tessera::data
