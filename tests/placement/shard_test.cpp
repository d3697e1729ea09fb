#include "tessera/placement/detail/shard.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/chunk.h>
#include <gtest/gtest.h>

#include <rapidcheck.h>

#include <algorithm>
#include <limits>

namespace tessera {
namespace {

using Numbers = std::vector<int64_t>;

TEST(Shard, SizesAndRangesOfExamples) {
  EXPECT_EQ(shard_sizes(Shard(0), 5, 4), (Numbers{2, 2, 1, 0}));
  EXPECT_EQ(shard_sizes(Shard(0), 9, 4), (Numbers{3, 3, 3, 0}));
  EXPECT_EQ(shard_sizes(Shard(0), 10, 4), (Numbers{3, 3, 3, 1}));
  EXPECT_EQ(shard_sizes(Shard(0), 2, 4), (Numbers{1, 1, 0, 0}));
  EXPECT_EQ(shard_sizes(Shard(0), 0, 2), (Numbers{0, 0}));
  EXPECT_EQ(shard_sizes(Shard(0, 4), 12, 2), (Numbers{8, 4}));
  EXPECT_EQ(shard_sizes(Shard(0, 4), 13, 2), (Numbers{8, 5}));
  EXPECT_EQ(shard_sizes(StridedShard(0, 2), 10, 4), (Numbers{4, 4, 2, 0}));
  EXPECT_EQ(shard_ranges(StridedShard(0, 2), 8, 2, 1), (IndexRanges{{2, 4}, {6, 8}}));
  EXPECT_EQ(shard_ranges(Shard(0), 5, 4, 3), IndexRanges());
}

// 8 rows, mesh [[0 1] [2 3]]: the second axis shards first; the first axis shards each of its shards.
TEST(Shard, StridedShardIsAppliedAfterTheAxesItCounts) {
  Placements fsdp_of_tp{StridedShard(0, 2), Shard(0)};
  auto rows = [&](int64_t dp, int64_t tp, int64_t size) { return local_ranges(fsdp_of_tp, {2, 2}, {dp, tp}, 0, size); };
  EXPECT_EQ(rows(0, 0, 8), (IndexRanges{{0, 2}}));
  EXPECT_EQ(rows(0, 1, 8), (IndexRanges{{4, 6}}));
  EXPECT_EQ(rows(1, 0, 8), (IndexRanges{{2, 4}}));
  EXPECT_EQ(rows(1, 1, 8), (IndexRanges{{6, 8}}));
  EXPECT_EQ(shard_order(fsdp_of_tp, {2, 2}, 0), (ShardOrder{{1, Shard(0)}, {0, Shard(0)}}));
  EXPECT_EQ(shard_order(Placements{StridedShard(0, 2), Replicate()}, {2, 2}, 0), (ShardOrder{{0, StridedShard(0, 2)}}));
  // It also holds for uneven sizes and for shards with a block size.
  for (int64_t size = 0; size <= 20; size++)
    for (int64_t block : {1, 3})
      for (int64_t dp = 0; dp < 3; dp++)
        for (int64_t tp = 0; tp < 2; tp++) {
          Placements strided{StridedShard(0, 2), Shard(0, block)}, plain{Shard(0, block), Shard(0)};
          EXPECT_EQ(local_ranges(strided, {3, 2}, {dp, tp}, 0, size), local_ranges(plain, {2, 3}, {tp, dp}, 0, size));
        }
  Placements twice{StridedShard(0, 2), StridedShard(0, 2), Shard(0)};
  EXPECT_EQ(shard_order(twice, {2, 3, 2}, 0), (ShardOrder{{2, Shard(0)}, {0, Shard(0)}, {1, Shard(0)}}));
  // Three axes: tp shards first, then cp, then dp.
  Placements three{StridedShard(0, 6), StridedShard(0, 2), Shard(0)};
  EXPECT_EQ(shard_order(three, {2, 3, 2}, 0), (ShardOrder{{2, Shard(0)}, {1, Shard(0)}, {0, Shard(0)}}));
}

TEST(Shard, AxesShardFromLeftToRight) {
  Placements both{Shard(0), Shard(0)};
  EXPECT_EQ(local_ranges(both, {2, 2}, {0, 1}, 0, 10), (IndexRanges{{3, 5}}));
  EXPECT_EQ(local_ranges(both, {2, 2}, {1, 0}, 0, 8), (IndexRanges{{4, 6}}));
  EXPECT_EQ(local_sizes(Placements{Shard(0), Shard(1)}, {2, 3}, {1, 2}, {5, 7}), (Sizes{2, 1}));
  EXPECT_EQ(extent_after(both, {2, 2}, {0, 1}, 0, 10, 0), 10);
  EXPECT_EQ(extent_after(both, {2, 2}, {0, 1}, 0, 10, 1), 5);
  EXPECT_EQ(extent_after(both, {2, 2}, {0, 1}, 0, 10, 2), 2);
}

TEST(Shard, SizesAreThoseOfAtChunk) {
  for (int64_t size = 1; size <= 40; size++)
    for (int64_t n = 1; n <= 6; n++) {
      auto chunks = at::chunk(at::arange(size), n);
      Numbers expected;
      for (const auto& c : chunks) expected.push_back(c.size(0));
      expected.resize(static_cast<size_t>(n), 0);
      EXPECT_EQ(shard_sizes(Shard(0), size, n), expected) << size << " over " << n;
    }
}

struct Case {
  Placements placements;
  Numbers shape;
  int64_t size;
};

Case any_case() {
  Case c;
  auto axes = *rc::gen::elementOf(std::vector<int>{1, 2, 3});
  c.size = *rc::gen::inRange<int64_t>(0, 41);
  for (int a = 0; a < axes; a++) {
    c.shape.push_back(*rc::gen::elementOf(Numbers{1, 2, 2, 3, 4, 5, 6}));
    auto factor = *rc::gen::elementOf(Numbers{1, 2, 2, 3, 4, 6});
    switch (*rc::gen::inRange(0, 4)) {
      case 0:
        c.placements.push_back(Shard(0));
        break;
      case 1:
        c.placements.push_back(Shard(0, factor));
        break;
      case 2:
        c.placements.push_back(StridedShard(0, factor));
        break;
      default:
        c.placements.push_back(*rc::gen::elementOf(Numbers{0, 1}) ? Replicate() : Shard(1));
    }
  }
  return c;
}

template <class Body>
void for_every_coordinate(const Numbers& shape, Body body) {
  Numbers at(shape.size(), 0);
  for (;;) {
    body(at);
    size_t axis = shape.size();
    while (axis > 0 && ++at[axis - 1] == shape[axis - 1]) at[--axis] = 0;
    if (axis == 0) return;
  }
}

TEST(Shard, UnevenShardsCoverTheDimOnce) {
  EXPECT_TRUE(rc::check("one rank has each index, for each coordinate of the axes that do not shard the dim", [] {
    auto c = any_case();
    Numbers holders(static_cast<size_t>(c.size), 0);
    int64_t copies = 1;
    for (size_t a = 0; a < c.shape.size(); a++) copies *= c.placements[a].is_sharded(0) ? 1 : c.shape[a];
    for_every_coordinate(c.shape, [&](const Numbers& at) {
      int64_t held = 0, last = -1;
      for (auto [begin, end] : local_ranges(c.placements, c.shape, at, 0, c.size)) {
        RC_ASSERT(begin > last);  // ascending, and adjacent ranges are merged
        RC_ASSERT(begin < end);
        for (auto i = begin; i < end; i++) holders[i]++;
        held += end - begin;
        last = end;
      }
      RC_ASSERT(held == local_sizes(c.placements, c.shape, at, {c.size, 100})[0]);
    });
    for (auto h : holders) RC_ASSERT(h == copies);
  }));
}

TEST(Shard, IsEvenMeansEqualSizes) {
  EXPECT_TRUE(rc::check([] {
    auto c = any_case();
    bool equal = true;
    int64_t first = -1;
    for_every_coordinate(c.shape, [&](const Numbers& at) {
      auto size = local_sizes(c.placements, c.shape, at, {c.size, 100})[0];
      first = first < 0 ? size : first;
      equal &= size == first;
    });
    RC_ASSERT(is_even(c.placements, c.shape, 0, c.size) == equal);
  }));
}

// Sizes and blocks of any number, as a file or a user may give them: the shards are consecutive and cover the dim.
TEST(Shard, HugeSizesAndBlocks) {
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  for (int64_t size : {int64_t{0}, int64_t{5}, kMost / 2, kMost - 1, kMost})
    for (int64_t block : {int64_t{1}, int64_t{3}, kMost / 2, kMost})
      for (int64_t n : {1, 2, 3, 7}) {
        int64_t end = 0;
        for (int64_t i = 0; i < n; i++) {
          for (const auto& range : shard_ranges(Shard(0, block), size, n, i)) {
            EXPECT_EQ(range.begin, end);
            EXPECT_LT(range.begin, range.end);
            end = range.end;
          }
        }
        EXPECT_EQ(end, size) << "block " << block << ", " << n << " ranks";
      }
}

}  // namespace
}  // namespace tessera
