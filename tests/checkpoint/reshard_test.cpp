// Boxes of one split to boxes of another, on numbers alone.
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

TEST(Box, IsAValue) {
  EXPECT_EQ(c10::str(box({{0, 2}, {3, 5}})), "[0:2, 3:5]");
  EXPECT_EQ(box({}).numel(), 1);  // a scalar
  EXPECT_EQ(intersection(box({{0, 4}, {0, 4}}), box({{2, 6}, {3, 4}})), box({{2, 4}, {3, 4}}));
  EXPECT_EQ(intersection(box({{0, 4}}), box({{4, 6}})), std::nullopt);
  EXPECT_EQ(intersection(box({}), box({})), box({}));
  EXPECT_EQ(without(box({{0, 3}, {0, 4}}), {box({{1, 2}, {1, 3}})}),
            (Boxes{box({{0, 1}, {0, 4}}), box({{2, 3}, {0, 4}}), box({{1, 2}, {0, 1}}), box({{1, 2}, {3, 4}})}));
  EXPECT_TRUE(without(box({}), {box({})}).empty());
}

TEST(Reshard, FromTwoRanksToThree) {
  const auto plan = reshard({box({{0, 3}}), box({{3, 5}})}, {box({{2, 4}})});
  EXPECT_EQ(plan.copies, (std::vector<Copy>{{0, 0, box({{2, 3}})}, {1, 0, box({{3, 4}})}}));
  EXPECT_TRUE(plan.missing.empty());
}

TEST(Reshard, NamesWhatWasNotSaved) {
  const auto plan = reshard({box({{0, 2}, {0, 4}})}, {box({{0, 3}, {1, 4}})});
  EXPECT_EQ(plan.copies, (std::vector<Copy>{{0, 0, box({{0, 2}, {1, 4}})}}));
  EXPECT_EQ(plan.missing, (Boxes{box({{2, 3}, {1, 4}})}));
}

TEST(Tiling, SaysWhatIsWrong) {
  EXPECT_EQ(why_no_tiling({4}, {box({{2, 4}}), box({{0, 2}})}), "");
  EXPECT_EQ(why_no_tiling({4}, {box({{0, 4}}), box({{4, 4}})}), "");
  EXPECT_EQ(why_no_tiling({}, {box({})}), "");
  EXPECT_EQ(why_no_tiling({0, 3}, {}), "");
  EXPECT_EQ(why_no_tiling({4}, {box({{0, 3}}), box({{2, 4}})}), "pieces [0:3] and [2:4] both have [2:3]");
  EXPECT_EQ(why_no_tiling({}, {box({}), box({})}), "pieces [] and [] both have []");
  EXPECT_EQ(why_no_tiling({4}, {box({{0, 2}}), box({{3, 4}})}), "nobody has [2:3]");
  EXPECT_EQ(why_no_tiling({4}, {box({{0, 5}})}), "piece [0:5] is outside of it");
  EXPECT_EQ(why_no_tiling({4}, {box({{0, 4}, {0, 1}})}), "a piece [0:4, 0:1] has 2 dims, and the tensor 1");
  EXPECT_EQ(why_no_tiling({int64_t{1} << 40, int64_t{1} << 40}, {}).substr(0, 24), "no tensor has the sizes ");
}

// Cuts of a dim anywhere, so pieces are uneven, and some are empty.
std::vector<int64_t> any_cuts(int64_t size) {
  auto cuts =
      *rc::gen::container<std::vector<int64_t>>(*rc::gen::inRange(0, 4), rc::gen::inRange<int64_t>(0, size + 1));
  cuts.push_back(0);
  cuts.push_back(size);
  std::sort(cuts.begin(), cuts.end());
  return cuts;
}

Boxes any_split(const std::vector<int64_t>& sizes) {
  Boxes boxes{Box{}};
  for (const int64_t size : sizes) {
    const auto cuts = any_cuts(size);
    Boxes longer;
    for (const auto& b : boxes)
      for (size_t i = 0; i + 1 < cuts.size(); i++) {
        longer.push_back(b);
        longer.back().offsets.push_back(cuts[i]);
        longer.back().sizes.push_back(cuts[i + 1] - cuts[i]);
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
    const auto saved = any_split(sizes), needed = any_split(sizes);
    RC_ASSERT(why_no_tiling(sizes, saved) == "");
    const auto plan = reshard(saved, needed);
    RC_ASSERT(plan.missing.empty());
    std::vector<int> copied(static_cast<size_t>(Box::whole(sizes).numel()), 0);
    for (const auto& copy : plan.copies) {
      RC_ASSERT(intersection(copy.what, saved[copy.saved]) == copy.what);
      RC_ASSERT(intersection(copy.what, needed[copy.needed]) == copy.what);
      each_element(copy.what, sizes, [&](int64_t at) { copied[static_cast<size_t>(at)]++; });
    }
    RC_ASSERT(std::all_of(copied.begin(), copied.end(), [](int times) { return times == 1; }));
  }));
}

TEST(Reshard, WhatIsLostIsMissingAndNothingElse) {
  EXPECT_TRUE(rc::check([] {
    const auto sizes =
        *rc::gen::container<std::vector<int64_t>>(*rc::gen::inRange(1, 4), rc::gen::inRange<int64_t>(1, 7));
    auto saved = any_split(sizes);
    const auto needed = any_split(sizes);
    const auto lost = *rc::gen::inRange<size_t>(0, saved.size());
    const auto hole = saved[lost];
    saved.erase(saved.begin() + static_cast<std::ptrdiff_t>(lost));
    RC_ASSERT((why_no_tiling(sizes, saved) == "") == (hole.numel() == 0));
    std::vector<int> seen(static_cast<size_t>(Box::whole(sizes).numel()), 0);
    each_element(hole, sizes, [&](int64_t at) { seen[static_cast<size_t>(at)]++; });
    for (const auto& missing : reshard(saved, needed).missing)
      each_element(missing, sizes, [&](int64_t at) { seen[static_cast<size_t>(at)]--; });
    RC_ASSERT(std::all_of(seen.begin(), seen.end(), [](int times) { return times == 0; }));
  }));
}

TEST(Tiling, OverlapsAreSeen) {
  EXPECT_TRUE(rc::check([] {
    const auto sizes =
        *rc::gen::container<std::vector<int64_t>>(*rc::gen::inRange(1, 3), rc::gen::inRange<int64_t>(1, 6));
    auto boxes = any_split(sizes);
    const auto twice = boxes[*rc::gen::inRange<size_t>(0, boxes.size())];
    RC_PRE(twice.numel() > 0);
    boxes.push_back(twice);
    RC_ASSERT(why_no_tiling(sizes, boxes).find("both have") != std::string::npos);
  }));
}

}  // namespace
}  // namespace tessera::dcp
