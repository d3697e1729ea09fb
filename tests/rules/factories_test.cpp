#include "tests/rules/family_test.h"

#include <algorithm>

namespace tessera::testing {
namespace {

TEST(FactoryRules, HoldByBruteForce) {
  auto x = numbers({5, 3}), t = numbers({3, 5}).t();
  auto ints = [](std::vector<int64_t> v) { return c10::IValue(std::move(v)); };
  expect_family_holds("factories",
                      {
                          {"aten::zeros_like", {x}, {}},
                          {"aten::zeros_like", {t}, {}},
                          {"aten::ones_like", {x}, {}},
                          {"aten::full_like", {t, 1.5}, {}},
                          {"aten::new_zeros", {x, ints({5, 3})}, {}},
                          {"aten::new_zeros", {x, ints({4})}, {}},
                          {"aten::new_ones", {t, ints({5, 3})}, {}},
                          {"aten::new_full", {x, ints({5, 3}), 2.5}, {}},
                      },
                      // Their values are undefined; their geometry is tested below.
                      {"aten::empty_like", "aten::new_empty", "aten::new_empty_strided"});
}

// ones_like of a P(sum) tensor is R: a sum of ones would be the number of ranks.
TEST(FactoryRules, PartialInputGivesReplicate) {
  auto x = numbers({5, 3});
  for (const auto* op : {"aten::ones_like", "aten::zeros_like", "aten::empty_like", "aten::rand_like"}) {
    const auto* rule = rules::registry().find(op);
    ASSERT_TRUE(rule) << op;
    auto strategies = rule->fn(call_query({op, {x}, {}})).strategies;
    auto partial = std::find_if(strategies.begin(), strategies.end(),
                                [](const auto& strategy) { return strategy.in[0] == Partial(); });
    ASSERT_NE(partial, strategies.end()) << op;
    EXPECT_EQ(partial->out[0], Replicate()) << op;
  }
}

TEST(FactoryRules, NewEmptyStridedKeepsTheOrderOfDims) {
  auto x = numbers({5, 3});
  Sample sample{"aten::new_empty_strided", {x, std::vector<int64_t>{5, 3}, std::vector<int64_t>{1, 5}}, {}};
  auto rule = rules::registry().find(sample.op)->fn(call_query(sample));
  EXPECT_EQ(rule.outs[0].strides, (Sizes{1, 5}));
  ASSERT_EQ(rule.fixes.size(), 2u);
  EXPECT_EQ(rule.fixes[0].what, rules::ArgFix::What::OutSizes);
  EXPECT_EQ(rule.fixes[1].what, rules::ArgFix::What::OutStrides);
}

}  // namespace
}  // namespace tessera::testing
