#include "tests/rules/family_test.h"

namespace tessera::testing {
namespace {

TEST(ArrangingRules, HoldByBruteForce) {
  auto x = numbers({5, 3}), y = numbers({2, 5, 3});
  auto ints = [](std::vector<int64_t> v) { return c10::IValue(std::move(v)); };
  expect_family_holds("arranging", {
                                       {"aten::flip", {y, ints({1})}, {}},
                                       {"aten::roll", {x, ints({2}), ints({0})}, {}},
                                       {"aten::flip", {numbers({3, 5}).t(), ints({1})}, {}},
                                       {"aten::roll", {numbers({3, 5}).t(), ints({2}), ints({0})}, {}},
                                       {"aten::tril", {numbers({3, 5}).t(), 0}, {}},
                                       {"aten::repeat", {numbers({3, 5}).t(), ints({1, 2})}, {}},
                                       {"aten::constant_pad_nd", {numbers({3, 5}).t(), ints({1, 2}), 0.5}, {}},
                                       {"aten::slice_scatter", {numbers({3, 5}).t(), numbers({5, 1}), 1, 1, 2, 1}, {}},
                                       {"aten::roll", {x, ints({2}), ints({})}, {}},
                                       {"aten::tril", {y, 1}, {}},
                                       {"aten::tril_", {y, 0}, {}},
                                       {"aten::triu", {y, -1}, {}},
                                       {"aten::triu_", {y, 0}, {}},
                                       {"aten::repeat", {x, ints({2, 1, 3})}, {}},
                                       {"aten::constant_pad_nd", {y, ints({1, 2}), 0.5}, {}},
                                       {"aten::constant_pad_nd", {y, ints({0, 0, 1, 0})}, {}},
                                       {"aten::slice_scatter", {y, numbers({2, 2, 3}), 1, 1, 5, 2}, {}},
                                       {"aten::diag_embed", {x}, {}},
                                       {"aten::diag_embed", {y, -1, 0, 2}, {}},
                                       {"aten::diagonal_scatter", {y, numbers({3, 2}), 0, 0, 1}, {}},
                                       {"aten::diagonal_scatter", {y, numbers({2, 2}), 1, 1, 2}, {}},
                                       {"aten::select_scatter", {y, numbers({2, 3}), 1, 2}, {}},
                                   });
}

}  // namespace
}  // namespace tessera::testing
