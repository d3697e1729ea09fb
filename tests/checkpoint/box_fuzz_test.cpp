// Boxes whose numbers come from a file: arithmetic gives the true result or throws, whatever the numbers are.
#include "tessera/base/error.h"
#include "tessera/checkpoint/detail/box.h"

#include <gtest/gtest.h>

#include <limits>
#include <random>

namespace tessera::dcp {
namespace {

TEST(BoxFuzz, NumbersOfAnySize) {
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max(), kLeast = std::numeric_limits<int64_t>::min();
  const int64_t kNumbers[] = {0, 1, 2, 7, -1, -5, kMost, kMost - 1, kMost / 2, kLeast, kLeast + 1, int64_t{1} << 32};
  std::mt19937 random(1);
  int threw = 0, returned = 0;
  for (int i = 0; i < 20'000; i++) {
    const auto draw = [&] {
      Box box;
      for (int d = 0; d < 3; d++) {
        box.offsets.push_back(kNumbers[random() % std::size(kNumbers)]);
        box.sizes.push_back(kNumbers[random() % std::size(kNumbers)]);
      }
      return box;
    };
    const auto a = draw(), b = draw();
    try {
      __int128 numel = 1;
      for (auto size : a.sizes) numel *= size;
      EXPECT_EQ(static_cast<__int128>(a.numel()) == numel, true) << c10::IntArrayRef(a.sizes);
      const auto both = intersection(a, b);
      if (both) {
        for (size_t d = 0; d < 3; d++) {
          EXPECT_LE(a.offsets[d], both->offsets[d]);
          EXPECT_LE(both->end(d), a.end(d));
          EXPECT_LE(both->end(d), b.end(d));
        }
        for (const auto& part : difference(a, {b})) EXPECT_FALSE(intersection(part, b));
      }
      returned++;
    } catch (const UsageError&) {
      threw++;
    }
  }
  EXPECT_GT(threw, 1000);
  EXPECT_GT(returned, 100);
}

}  // namespace
}  // namespace tessera::dcp
