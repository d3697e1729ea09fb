#include "tests/rules/family_test.h"

namespace tessera::testing {
namespace {

TEST(ViewBackwardRules, HoldByBruteForce) {
  auto sizes = [](std::vector<int64_t> v) { return c10::IValue(std::move(v)); };
  expect_family_holds(
      "view_backward",
      {
          {"aten::slice_backward", {numbers({2, 3}), sizes({5, 3}), 0, 1, 5, 2}, {}},
          {"aten::slice_backward", {numbers({5, 3}), sizes({5, 3}), 0, 0, std::numeric_limits<int64_t>::max(), 1}, {}},
          {"aten::select_backward", {numbers({5, 4}), sizes({5, 3, 4}), 1, 2}, {}},
          {"aten::diagonal_backward", {numbers({4, 3}), sizes({3, 4, 5}), 1, 0, 2}, {}},
          {"aten::unfold_backward", {numbers({2, 2, 3}), sizes({5, 2}), 0, 3, 2}, {}},
          {"aten::value_selecting_reduction_backward",
           {numbers({5, 4}), 1, integers({5, 4}, 3), sizes({5, 3, 4}), false},
           {}},
          {"aten::value_selecting_reduction_backward",
           {numbers({5, 1}), -1, integers({5, 1}, 3), sizes({5, 3}), true},
           {}},
      });
}

}  // namespace
}  // namespace tessera::testing
