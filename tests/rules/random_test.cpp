#include "tests/rules/family_test.h"

namespace tessera::testing {
namespace {

// The values of random ops are tested with the dispatcher. This checks their strategies: replicated or sharded, never
// partial.
TEST(RandomRules, NeverPartial) {
  auto ops = ops_of_family("random");
  EXPECT_GT(ops.size(), 10u);
  for (const auto& op : ops)
    for (const auto& sample : samples_by_schema(op)) {
      auto rule = rules::registry().find(op)->fn(call_query(sample));
      EXPECT_GE(rule.strategies.size(), 3u) << op;
      for (const auto& strategy : rule.strategies)
        for (const auto& out : strategy.out) EXPECT_FALSE(out.is_partial()) << op;
    }
}

TEST(RandomRules, DropoutMaskAndResultHaveEqualPlacements) {
  auto rule = rules::registry()
                  .find("aten::native_dropout")
                  ->fn(call_query({"aten::native_dropout", {numbers({5, 3}), 0.5, true}, {}}));
  ASSERT_EQ(rule.outs.size(), 2u);
  for (const auto& strategy : rule.strategies) EXPECT_EQ(strategy.out[0], strategy.out[1]);
}

}  // namespace
}  // namespace tessera::testing
