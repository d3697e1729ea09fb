#pragma once
#include <cstdint>

namespace tessera::data {

// 0 .. size-1 in another order, computed and not stored: place i of a data set of any size costs the same.
//
// A Feistel network turns numbers of 2h bits into one another, whatever its round function: it cuts a number in two
// halves and xors one half with a function of the other, round after round. Where 2^2h is more than `size`, a result
// that is too large is put in again until one is not (it ends: the network is a permutation, so from i it comes back to
// i at last). 2^2h is less than 4 size, so that takes fewer than four rounds on average.
//
// Example:  Permutation order(1000, seed);   order(0), order(1), ...   each of 0 .. 999 once
class Permutation {
 public:
  Permutation(int64_t size, uint64_t key);  // UsageError if the size is below 1
  int64_t operator()(int64_t place) const;  // UsageError if it is not one of 0 .. size-1
  int64_t size() const { return size_; }

 private:
  uint64_t scramble(uint64_t x) const;

  int64_t size_;
  uint64_t key_;
  int half_bits_ = 1;
};

}  // namespace tessera::data
