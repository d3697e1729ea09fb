// Exhaustive: every view between small shapes, every sharding. Apart from view_test.cpp, so that both run at a time.
#include "tests/rules/family_test.h"

namespace tessera::testing {
namespace {

using Shapes = std::vector<std::vector<int64_t>>;

// Verifies each shape viewed as each other one. Returns how many shardings the views keep.
int64_t verify_views_between(const Shapes& shapes) {
  int64_t kept = 0;
  for (const auto& from : shapes)
    for (const auto& to : shapes) {
      auto report = verify_rule({"aten::view", {numbers(from), c10::IValue(to)}, {}});
      EXPECT_TRUE(report.wrong.empty()) << c10::IntArrayRef(from) << " -> " << c10::IntArrayRef(to) << "\n" << report;
      kept += report.kept;
    }
  return kept;
}

// A rule that keeps no sharding would be correct, and of no use: hence the lower bounds.
TEST(ViewReshapes, ShapesOfTwelveElements) {
  EXPECT_GT(verify_views_between({{12}, {2, 6}, {6, 2}, {3, 4}, {4, 3}, {2, 2, 3}, {2, 3, 2}, {1, 12}, {3, 1, 4}}),
            1000);
}
TEST(ViewReshapes, ShapesOfSixteenElements) {
  EXPECT_GT(verify_views_between({{16}, {2, 8}, {8, 2}, {4, 4}, {2, 2, 4}, {4, 2, 2}, {1, 4, 4}}), 1000);
}

}  // namespace
}  // namespace tessera::testing
