#include "tests/rules/family_test.h"

#include <algorithm>
#include <set>

namespace tessera::testing {
namespace {

// The registered rule with one more strategy.
rules::OpRule with_row(const std::string& op, Placements in, Placement out) {
  auto planted = *rules::registry().find(op);
  planted.fn = [fn = planted.fn, in, out](const rules::OpQuery& query) {
    auto rule = fn(query);
    rule.add_strategy(in, {out});
    return rule;
  };
  return planted;
}

// The oracle must find these two wrong strategies.
TEST(RuleOracle, FindsWrongStrategies) {
  auto x = numbers({5, 3}), y = numbers({5, 3}).sub(0.5);
  auto add = with_row("aten::add.Tensor", {Partial(), Replicate()}, Partial());
  auto report = verify_rule({"aten::add.Tensor", {x, y}, {}}, &add);
  ASSERT_EQ(report.wrong.size(), 1u) << report;
  EXPECT_NE(report.wrong[0].find("want"), std::string::npos) << report;

  auto mul = with_row("aten::mul.Tensor", {Partial(ReduceOp::Max), Replicate()}, Partial(ReduceOp::Max));
  report = verify_rule({"aten::mul.Tensor", {x, y}, {}}, &mul);  // y has negative elements
  EXPECT_EQ(report.wrong.size(), 1u) << report;
}

TEST(RuleOracle, FindsWrongShardsAndWrongGeometry) {
  auto x = numbers({5, 3});
  auto softmax = with_row("aten::_softmax", {Shard(1)}, Shard(1));
  EXPECT_FALSE(verify_rule({"aten::_softmax", {x, 1, false}, {}}, &softmax).wrong.empty());
  auto unequal = with_row("aten::mm", {Shard(0), Shard(0)}, Shard(0));
  EXPECT_FALSE(verify_rule({"aten::mm", {x, numbers({3, 4})}, {}}, &unequal).wrong.empty());
  auto strides = *rules::registry().find("aten::t");
  strides.fn = [fn = strides.fn](const rules::OpQuery& query) {
    auto rule = fn(query);
    rule.outs[0].strides = {};
    return rule;
  };
  EXPECT_FALSE(verify_rule({"aten::t", {x}, {}}, &strides).wrong.empty());
}

TEST(RuleOracle, FindsAMeanOfMeans) {
  auto mean = *rules::registry().find("aten::mean");
  mean.fn = [fn = mean.fn](const rules::OpQuery& query) {
    auto rule = fn(query);
    rule.special = "";
    rule.strategies = {{{Shard(0)}, {Partial(ReduceOp::Avg)}}};
    return rule;
  };
  EXPECT_FALSE(verify_rule({"aten::mean", {numbers({5, 3})}, {}}, &mean).wrong.empty());
}

// A family without a test has ops without samples.
TEST(RuleOracle, EveryFamilyHasATest) {
  // "decomposed" and "gathered" have no strategies: tests/dtensor/every_op_test.cpp runs these ops.
  const std::set<std::string> tested = {
      "arranging",     "attention", "batch",    "convolution", "copy",    "decomposed", "embedding",
      "factories",     "foreach",   "gathered", "indexing",    "joining", "loss",       "matmul",
      "normalization", "pointwise", "random",   "reduction",   "scan",    "view",       "view_backward"};
  std::set<std::string> registered;
  for (const auto& name : rules::registry().names()) registered.insert(rules::registry().find(name)->family);
  EXPECT_EQ(registered, tested);
}

}  // namespace
}  // namespace tessera::testing
