#include "tessera/base/detail/hash.h"

#include <gtest/gtest.h>

#include <set>
#include <string>

namespace tessera {
namespace {

TEST(Hash, OrderOfWordsCounts) {
  EXPECT_NE(hash_combine(hash_combine(0, uint64_t{1}), uint64_t{2}),
            hash_combine(hash_combine(0, uint64_t{2}), uint64_t{1}));
}

TEST(Hash, SmallNumbersDoNotCollide) {
  std::set<uint64_t> hashes;
  for (uint64_t a = 0; a < 64; a++)
    for (uint64_t b = 0; b < 64; b++) hashes.insert(hash_combine(hash_combine(0, a), b));
  EXPECT_EQ(hashes.size(), 64u * 64u);
}

TEST(Hash, EveryByteCounts) {
  const std::string text = "thirteen byte";
  for (size_t i = 0; i < text.size(); i++) {
    auto other = text;
    other[i]++;
    EXPECT_NE(hash_bytes(text.data(), text.size()), hash_bytes(other.data(), other.size())) << i;
  }
  EXPECT_NE(hash_bytes("\0\0", 1), hash_bytes("\0\0", 2));
  EXPECT_EQ(hash_bytes(text.data(), text.size()), hash_bytes(std::string(text).data(), text.size()));
}

}  // namespace
}  // namespace tessera
