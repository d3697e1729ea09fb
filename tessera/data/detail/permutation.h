#pragma once
#include <cstdint>

namespace tessera::data {

// A random permutation of 0 .. size-1 that is computed, not stored: each element costs O(1) for any size.
//
// A Feistel network permutes the numbers of 2h bits for any round function: it splits a number into two halves and XORs
// one half with a function of the other, round after round. If 2^2h is greater than `size`, a result that is too large
// is permuted again until it fits (cycle walking; it ends, because the cycle returns to the start). 2^2h is less than
// 4 size, so this takes fewer than four rounds on average.
//
// Example:  Permutation order(1000, seed);   order(0), order(1), ...   each of 0 .. 999 once
class Permutation {
 public:
  Permutation(int64_t size, uint64_t key);  // throws UsageError if size < 1
  int64_t operator()(int64_t i) const;      // throws UsageError unless 0 <= i < size
  int64_t size() const { return size_; }

 private:
  uint64_t scramble(uint64_t x) const;

  int64_t size_;
  uint64_t key_;
  int half_bits_ = 1;
};

}  // namespace tessera::data
