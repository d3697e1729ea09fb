#pragma once
#include <c10/macros/Macros.h>

#include <algorithm>
#include <cstdint>

// Counter-based random words: philox4x32-10 of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011).
//
//   fill      one random op on one tensor; fill number n of a program has offset n
//   block     the result of one evaluation: four words of 32 bits, for the counter (block number, offset) and the key
//             `seed`
//   word w    lane w & 3 of block w >> 2
//
// The words of element i depend only on i, so every rank computes the same value for it. A distribution defines how
// many words make how many elements (distributions.h):
//
//   uniform float   element i <- word i                    uniform double   element i <- words 2i, 2i+1
//   normal float    elements 2k, 2k+1 <- words 2k, 2k+1    normal double    elements 2k, 2k+1 <- words 4k .. 4k+3
//
// The words equal those of at::Philox4_32(seed, subsequence = offset, offset = block).
namespace tessera::philox {

struct Stream {
  uint64_t seed, offset;
};

// Blocks are computed in batches of this size, lane by lane, so that the compiler vectorizes each line.
inline constexpr int kBlocks = 16;
inline constexpr int kWords = 4 * kBlocks;

// Words of blocks first .. first + n - 1, in order. Requires n <= kBlocks.
C10_ALWAYS_INLINE void make_blocks(Stream stream, uint64_t first, int n, uint32_t* words) {
  uint32_t c0[kBlocks], c1[kBlocks], c2[kBlocks], c3[kBlocks];
  for (int j = 0; j < n; j++) {
    const uint64_t block = first + static_cast<uint64_t>(j);
    c0[j] = static_cast<uint32_t>(block);
    c1[j] = static_cast<uint32_t>(block >> 32);
    c2[j] = static_cast<uint32_t>(stream.offset);
    c3[j] = static_cast<uint32_t>(stream.offset >> 32);
  }
  auto k0 = static_cast<uint32_t>(stream.seed), k1 = static_cast<uint32_t>(stream.seed >> 32);
  for (int round = 0; round < 10; round++) {
    for (int j = 0; j < n; j++) {
      const uint64_t p0 = uint64_t{0xD2511F53} * c0[j], p1 = uint64_t{0xCD9E8D57} * c2[j];
      c0[j] = static_cast<uint32_t>(p1 >> 32) ^ c1[j] ^ k0;
      c1[j] = static_cast<uint32_t>(p1);
      c2[j] = static_cast<uint32_t>(p0 >> 32) ^ c3[j] ^ k1;
      c3[j] = static_cast<uint32_t>(p0);
    }
    k0 += 0x9E3779B9;
    k1 += 0xBB67AE85;
  }
  for (int j = 0; j < n; j++) {
    words[4 * j] = c0[j];
    words[4 * j + 1] = c1[j];
    words[4 * j + 2] = c2[j];
    words[4 * j + 3] = c3[j];
  }
}

// Writes elements first .. first + n - 1 of a fill to out[0 .. n - 1].
//
//   Distribution::kTakes words make Distribution::kGives elements of type Value:  distribution(words, elements)
template <class Distribution>
void fill(Stream stream, const Distribution& distribution, int64_t first, int64_t n,
          typename Distribution::Value* out) {
  using Value = typename Distribution::Value;
  constexpr int kPerBlock = 4 / Distribution::kTakes * Distribution::kGives;
  constexpr int kMost = kBlocks * kPerBlock;
  const auto make = [&](int64_t block, int blocks, Value* to) C10_ALWAYS_INLINE_ATTRIBUTE {
    uint32_t words[kWords];
    make_blocks(stream, static_cast<uint64_t>(block), blocks, words);
    const int groups = blocks * (4 / Distribution::kTakes);
    for (int g = 0; g < groups; g++) distribution(words + g * Distribution::kTakes, to + g * Distribution::kGives);
  };
  while (n > 0) {
    const int64_t block = first / kPerBlock, skip = first % kPerBlock;
    int64_t made;
    if (skip == 0 && n >= kMost) {
      make(block, kBlocks, out);
      made = kMost;
    } else {  // a partial batch at either end
      Value some[kMost];
      made = std::min<int64_t>(kMost - skip, n);
      make(block, static_cast<int>((skip + made + kPerBlock - 1) / kPerBlock), some);
      std::copy(some + skip, some + skip + made, out);
    }
    first += made;
    out += made;
    n -= made;
  }
}

}  // namespace tessera::philox
