#include "tessera/numerics/detail/sum_tree.h"

#include "tessera/base/error.h"
#include "tessera/testing/expect_error.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <random>

namespace {

using tessera::IndexRange;
using namespace tessera::numerics;

std::vector<float> random_terms(int64_t n) {
  std::mt19937 generator(static_cast<uint32_t>(n));
  std::uniform_real_distribution<float> exponent(-12, 12);
  std::vector<float> terms;
  for (int64_t i = 0; i < n; i++) terms.push_back((i % 2 ? 1.0F : -1.0F) * std::exp2(exponent(generator)));
  return terms;
}

// The shard of rank r of `ranks`, as at::chunk makes it.
IndexRange shard_of(int64_t n, int64_t ranks, int64_t r) {
  const int64_t size = (n + ranks - 1) / ranks;
  return {std::min(n, r * size), std::min(n, (r + 1) * size)};
}

// Runs the steps on the terms of this rank.
std::vector<float> run_sum_steps(const std::vector<float>& terms, IndexRange owned, int64_t block) {
  std::vector<float> stack, subtrees;
  for (const auto& step : sum_steps(static_cast<int64_t>(terms.size()), owned, block)) {
    float sum = 0;
    for (auto i = step.begin; i < step.end; i++) sum += terms[static_cast<size_t>(owned.begin + i)];
    for (int merge = 0; merge < step.merges; merge++) {
      sum = stack.back() + sum;
      stack.pop_back();
    }
    (step.subtree < 0 ? stack : subtrees).push_back(sum);
  }
  EXPECT_TRUE(stack.empty());
  return subtrees;
}

float sum_over_ranks(const std::vector<float>& terms, int64_t ranks, int64_t block) {
  const auto n = static_cast<int64_t>(terms.size());
  std::vector<IndexRange> ranges;
  std::vector<float> slots;
  for (int64_t r = 0; r < ranks; r++) {
    const auto owned = shard_of(n, ranks, r);
    for (const auto& range : complete_subtrees(n, owned)) ranges.push_back(range);
    for (const auto value : run_sum_steps(terms, owned, block)) slots.push_back(value);
  }
  EXPECT_EQ(ranges.size(), slots.size());
  for (const auto& step : add_steps(n, ranges))
    slots.push_back(slots[static_cast<size_t>(step.left)] + slots[static_cast<size_t>(step.right)]);
  return slots.back();
}

TEST(SumTree, TwentyFourTerms) {
  const auto subtrees = [](IndexRange owned) { return complete_subtrees(24, owned, kShortestOfShards); };
  EXPECT_EQ(leaf_bounds(24, kShortestOfShards).size(), 25U);
  EXPECT_EQ(subtrees({0, 24}), (std::vector<IndexRange>{{0, 24}}));
  EXPECT_EQ(subtrees({12, 24}), (std::vector<IndexRange>{{12, 24}}));
  EXPECT_EQ(subtrees({0, 8}), (std::vector<IndexRange>{{0, 6}, {6, 7}, {7, 8}}));
  EXPECT_EQ(subtrees({8, 8}), (std::vector<IndexRange>{}));
  EXPECT_EQ(leaf_bounds(0), (std::vector<int64_t>{0}));
  EXPECT_EQ(leaf_bounds(1), (std::vector<int64_t>{0, 1}));
}

// Whether shards of these ranks are ranges of leaves.
bool has_leaves(int64_t n, int64_t ranks) {
  const auto bounds = leaf_bounds(n);
  for (int64_t r = 0; r < ranks; r++)
    if (!std::binary_search(bounds.begin(), bounds.end(), shard_of(n, ranks, r).begin)) return false;
  return true;
}

TEST(SumTree, ShardsOfManyTermsAreRangesOfLeaves) {
  const std::map<int64_t, std::vector<int64_t>> counts = {{24, {1}},
                                                          {192, {1, 2, 3}},
                                                          {512, {1, 2, 4, 8}},
                                                          {768, {1, 2, 3, 4, 6, 8, 12}},
                                                          {1536, {1, 2, 3, 4, 6, 8, 12, 24}},
                                                          {50257, {1, 2, 3, 4, 6, 8, 12, 24}}};
  for (const auto& [n, expected] : counts) {
    std::vector<int64_t> found;
    for (const auto ranks : kRankCounts)
      if (has_leaves(n, ranks)) found.push_back(ranks);
    EXPECT_EQ(found, expected) << n;
  }
}

// The property that everything else rests on: for any number of ranks of the table whose shards are ranges of leaves;
// of long sums, uneven shards, too.
TEST(SumTree, EveryShardingGivesTheSameBits) {
  int64_t orders_differ = 0;
  for (const int64_t n :
       {1, 2, 3, 5, 8, 25, 64, 96, 100, 192, 256, 257, 288, 384, 768, 960, 1000, 1152, 1601, 1999, 4800})
    for (const int64_t block : {1, 16, 256}) {
      const auto terms = random_terms(n);
      const float expected = sum_over_ranks(terms, 1, block);
      for (const auto ranks : kRankCounts) {
        if (has_leaves(n, ranks)) {
          EXPECT_EQ(sum_over_ranks(terms, ranks, block), expected) << n << " " << ranks;
        }
      }
      float in_rank_order = 0;  // the sum that the test must be able to reject: shards, then ranks in order
      for (int64_t r = 0; r < 3; r++) {
        float shard = 0;
        const auto owned = shard_of(n, 3, r);
        for (auto i = owned.begin; i < owned.end; i++) shard += terms[static_cast<size_t>(i)];
        in_rank_order += shard;
      }
      orders_differ += in_rank_order != expected;
    }
  EXPECT_GT(orders_differ, 30);
}

TEST(SumTree, SubtreesCoverWhatARankOwns) {
  for (int64_t n = 0; n < 300; n++)
    for (const auto ranks : kRankCounts)
      for (int64_t r = 0; r < ranks && n % ranks == 0; r++) {
        const auto owned = shard_of(n, ranks, r);
        auto next = owned.begin;
        for (const auto& range : complete_subtrees(n, owned, kShortestOfShards)) {
          ASSERT_EQ(range.begin, next);
          next = range.end;
        }
        ASSERT_EQ(next, owned.end);
      }
}

TEST(SumTree, OtherShardsAreRefused) {
  EXPECT_ERROR(tessera::ShardingError, complete_subtrees(240, {0, 48}), "240 terms", "[0, 48)",
               "2, 3, 4, 6, 8, 12 or 24 equal shards");
}

// A sum over parts has the bits of the sum over single terms, each of which is a sum itself.
TEST(SumTree, PartsOfNestedSumsGiveTheBitsOfSingleSums) {
  for (const int64_t count : {8, 24, 48, 50})
    for (const int64_t ranks : {1, 2})
      for (const int64_t most : {1, 2, 5, 50})
        for (const int64_t length : {1, 7, 96}) {
          const auto terms = random_terms(count * length);
          const auto owned = shard_of(count, ranks, ranks - 1);
          const auto part_sums = [&](int64_t at_most) {
            std::vector<float> outer, subtrees;
            for (const auto& part : part_steps(count, owned, at_most)) {
              EXPECT_LE(part.end - part.begin, at_most);
              const IndexRange shards{owned.begin + part.begin, owned.begin + part.end};
              std::vector<float> stack;
              float sum = 0;
              for (const auto& step : nested_steps(count, shards, length, 16)) {
                sum = 0;
                for (auto i = step.begin; i < step.end; i++)
                  sum += terms[static_cast<size_t>(shards.begin * length + i)];
                for (int merge = 0; merge < step.merges; merge++, stack.pop_back()) sum = stack.back() + sum;
                if (step.subtree < 0) stack.push_back(sum);
              }
              EXPECT_TRUE(stack.empty());
              for (int merge = 0; merge < part.merges; merge++, outer.pop_back()) sum = outer.back() + sum;
              (part.subtree < 0 ? outer : subtrees).push_back(sum);
            }
            return subtrees;
          };
          EXPECT_EQ(part_sums(most), part_sums(1)) << count << " " << ranks << " " << most << " " << length;
        }
}

}  // namespace
