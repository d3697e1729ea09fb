// Resharding plans: from the boxes of one split to the boxes of another.
#include "tessera/checkpoint/detail/reshard.h"

#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <algorithm>
#include <sstream>

namespace tessera::dcp {
namespace {

using Boxes = std::vector<Box>;

Box box(std::initializer_list<std::pair<int64_t, int64_t>> ranges) {
  Box box;
  for (const auto& [begin, end] : ranges) box.offsets.push_back(begin), box.sizes.push_back(end - begin);
  return box;
}

TEST(Box, PrintIntersectionAndDifference) {
  EXPECT_EQ(c10::str(box({{0, 2}, {3, 5}})), "[0:2, 3:5]");
  EXPECT_EQ(box({}).numel(), 1);  // a scalar
  EXPECT_EQ(intersection(box({{0, 4}, {0, 4}}), box({{2, 6}, {3, 4}})), box({{2, 4}, {3, 4}}));
  EXPECT_EQ(intersection(box({{0, 4}}), box({{4, 6}})), std::nullopt);
  EXPECT_EQ(intersection(box({}), box({})), box({}));
  EXPECT_EQ(difference(box({{0, 3}, {0, 4}}), {box({{1, 2}, {1, 3}})}),
            (Boxes{box({{0, 1}, {0, 4}}), box({{2, 3}, {0, 4}}), box({{1, 2}, {0, 1}}), box({{1, 2}, {3, 4}})}));
  EXPECT_TRUE(difference(box({}), {box({})}).empty());
}

TEST(Reshard, FromTwoRanksToThree) {
  const auto plan = reshard({box({{0, 3}}), box({{3, 5}})}, {box({{2, 4}})});
  EXPECT_EQ(plan.copies, (std::vector<BoxCopy>{{0, 0, box({{2, 3}})}, {1, 0, box({{3, 4}})}}));
  EXPECT_TRUE(plan.missing.empty());
}

TEST(Reshard, MissingBoxesAreListed) {
  const auto plan = reshard({box({{0, 2}, {0, 4}})}, {box({{0, 3}, {1, 4}})});
  EXPECT_EQ(plan.copies, (std::vector<BoxCopy>{{0, 0, box({{0, 2}, {1, 4}})}}));
  EXPECT_EQ(plan.missing, (Boxes{box({{2, 3}, {1, 4}})}));
}

TEST(Tiling, ErrorsNameTheBoxes) {
  EXPECT_EQ(tiling_error({4}, {box({{2, 4}}), box({{0, 2}})}), "");
  EXPECT_EQ(tiling_error({4}, {box({{0, 4}}), box({{4, 4}})}), "");
  EXPECT_EQ(tiling_error({}, {box({})}), "");
  EXPECT_EQ(tiling_error({0, 3}, {}), "");
  EXPECT_EQ(tiling_error({4}, {box({{0, 3}}), box({{2, 4}})}), "shards [0:3] and [2:4] overlap in [2:3]");
  EXPECT_EQ(tiling_error({}, {box({}), box({})}), "shards [] and [] overlap in []");
  EXPECT_EQ(tiling_error({4}, {box({{0, 2}}), box({{3, 4}})}), "no shard has [2:3]");
  EXPECT_EQ(tiling_error({4}, {box({{0, 5}})}), "shard [0:5] is outside of the tensor");
  EXPECT_EQ(tiling_error({4}, {box({{0, 4}, {0, 1}})}), "shard [0:4, 0:1] has 2 dims, and the tensor has 1");
  EXPECT_EQ(tiling_error({int64_t{1} << 40, int64_t{1} << 40}, {}).substr(0, 25), "these sizes are not valid");
}

// Random split points of a dim: boxes are uneven, and some are empty.
std::vector<int64_t> random_splits(int64_t size) {
  auto splits =
      *rc::gen::container<std::vector<int64_t>>(*rc::gen::inRange(0, 4), rc::gen::inRange<int64_t>(0, size + 1));
  splits.push_back(0);
  splits.push_back(size);
  std::sort(splits.begin(), splits.end());
  return splits;
}

Boxes random_boxes(const std::vector<int64_t>& sizes) {
  Boxes boxes{Box{}};
  for (const int64_t size : sizes) {
    const auto splits = random_splits(size);
    Boxes longer;
    for (const auto& b : boxes)
      for (size_t i = 0; i + 1 < splits.size(); i++) {
        longer.push_back(b);
        longer.back().offsets.push_back(splits[i]);
        longer.back().sizes.push_back(splits[i + 1] - splits[i]);
      }
    boxes = std::move(longer);
  }
  return boxes;
}

// Calls f(flat index) for every element of a box.
template <class F>
void each_element(const Box& box, const std::vector<int64_t>& sizes, const F& f, size_t dim = 0, int64_t base = 0) {
  if (dim == sizes.size()) return f(base);
  for (int64_t i = box.offsets[dim]; i < box.end(dim); i++) each_element(box, sizes, f, dim + 1, base * sizes[dim] + i);
}

TEST(Reshard, AnySplitToAnySplitCopiesEveryElementOnce) {
  EXPECT_TRUE(rc::check([] {
    const auto sizes =
        *rc::gen::container<std::vector<int64_t>>(*rc::gen::inRange(0, 4), rc::gen::inRange<int64_t>(0, 7));
    const auto saved = random_boxes(sizes), needed = random_boxes(sizes);
    RC_ASSERT(tiling_error(sizes, saved) == "");
    const auto plan = reshard(saved, needed);
    RC_ASSERT(plan.missing.empty());
    std::vector<int> copied(static_cast<size_t>(Box::full(sizes).numel()), 0);
    for (const auto& copy : plan.copies) {
      RC_ASSERT(intersection(copy.box, saved[copy.saved]) == copy.box);
      RC_ASSERT(intersection(copy.box, needed[copy.needed]) == copy.box);
      each_element(copy.box, sizes, [&](int64_t at) { copied[static_cast<size_t>(at)]++; });
    }
    RC_ASSERT(std::all_of(copied.begin(), copied.end(), [](int times) { return times == 1; }));
  }));
}

TEST(Reshard, OnlyALostBoxIsMissing) {
  EXPECT_TRUE(rc::check([] {
    const auto sizes =
        *rc::gen::container<std::vector<int64_t>>(*rc::gen::inRange(1, 4), rc::gen::inRange<int64_t>(1, 7));
    auto saved = random_boxes(sizes);
    const auto needed = random_boxes(sizes);
    const auto lost = *rc::gen::inRange<size_t>(0, saved.size());
    const auto hole = saved[lost];
    saved.erase(saved.begin() + static_cast<std::ptrdiff_t>(lost));
    RC_ASSERT((tiling_error(sizes, saved) == "") == (hole.numel() == 0));
    std::vector<int> seen(static_cast<size_t>(Box::full(sizes).numel()), 0);
    each_element(hole, sizes, [&](int64_t at) { seen[static_cast<size_t>(at)]++; });
    for (const auto& missing : reshard(saved, needed).missing)
      each_element(missing, sizes, [&](int64_t at) { seen[static_cast<size_t>(at)]--; });
    RC_ASSERT(std::all_of(seen.begin(), seen.end(), [](int times) { return times == 0; }));
  }));
}

TEST(Tiling, OverlapsAreFound) {
  EXPECT_TRUE(rc::check([] {
    const auto sizes =
        *rc::gen::container<std::vector<int64_t>>(*rc::gen::inRange(1, 3), rc::gen::inRange<int64_t>(1, 6));
    auto boxes = random_boxes(sizes);
    const auto twice = boxes[*rc::gen::inRange<size_t>(0, boxes.size())];
    RC_PRE(twice.numel() > 0);
    boxes.push_back(twice);
    RC_ASSERT(tiling_error(sizes, boxes).find("overlap in") != std::string::npos);
  }));
}

}  // namespace
}  // namespace tessera::dcp
