#include "tessera/base/error.h"
#include "tessera/placement/detail/shard.h"
#include "tessera/testing/expect_error.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

namespace tessera {
namespace {

std::vector<int64_t> indices_in(const IndexRanges& ranges) {
  std::vector<int64_t> indices;
  for (const auto& r : ranges)
    for (auto i = r.begin; i < r.end; i++) indices.push_back(i);
  return indices;
}

// SS(d,k,b) shards each of k parts as S(d,b) shards a dim.
TEST(StridedBlock, ShardsEachPartInBlocks) {
  for (int64_t size = 0; size <= 26; size++)
    for (int64_t parts = 1; parts <= 4; parts++)
      for (int64_t block = 1; block <= 4; block++)
        for (int64_t n = 1; n <= 4; n++) {
          const auto placement = StridedShard(0, parts, block);
          std::vector<int64_t> seen;
          for (int64_t rank = 0; rank < n; rank++) {
            std::vector<int64_t> expected;
            for (int64_t part = 0; part < parts; part++) {
              const auto each = (size + parts - 1) / parts, begin = std::min(part * each, size);
              for (const auto i : indices_in(shard_ranges(Shard(0, block), std::min(each, size - begin), n, rank)))
                expected.push_back(begin + i);
            }
            const auto mine = indices_in(shard_ranges(placement, size, n, rank));
            EXPECT_EQ(mine, expected);
            EXPECT_EQ(shard_size(placement, size, n, rank), static_cast<int64_t>(mine.size()));
            seen.insert(seen.end(), mine.begin(), mine.end());
            // A redundant block does not change the shard.
            const auto simple = drop_redundant_blocks({placement}, {n}, {size});
            EXPECT_EQ(indices_in(shard_ranges(simple[0], size, n, rank)), mine) << placement << " " << simple[0];
          }
          std::sort(seen.begin(), seen.end());
          std::vector<int64_t> all(static_cast<size_t>(size));
          std::iota(all.begin(), all.end(), 0);
          EXPECT_EQ(seen, all);
        }
}

TEST(StridedBlock, PrintsAndParses) {
  EXPECT_EQ(to_string(StridedShard(0, 3, 4)), "SS(0,3,4)");
  EXPECT_EQ(parse_placement("SS(-1, 3, 4)"), StridedShard(-1, 3, 4));
  EXPECT_EQ(parse_placement("SS(1,2,1)"), StridedShard(1, 2));
  EXPECT_NE(StridedShard(0, 3, 4), StridedShard(0, 3));
  EXPECT_NE(StridedShard(0, 3, 4).hash(), StridedShard(0, 3).hash());
  EXPECT_EQ(StridedShard(0, 3, 4).with_dim(1), StridedShard(1, 3, 4));
  for (const char* bad : {"SS(0,3,0)", "SS(0,3,x)", "SS(0,3,4,5)", "S(0,3,4)", "SS(0,,4)"})
    EXPECT_ERROR(UsageError, parse_placement(bad), "is not a placement");
  EXPECT_ERROR(UsageError, StridedShard(0, 3, 0), "block size must be at least 1");
}

}  // namespace
}  // namespace tessera
