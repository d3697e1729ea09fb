#include "tessera/base/error.h"
#include "tests/rules/family_test.h"

namespace tessera::testing {
namespace {

using rules::OpQuery;
using rules::Registry;
using rules::registry;
using rules::Rule;

TEST(Registry, ReplacesRulesCountsVersionsAndCopiesRules) {
  Registry registry;
  auto one_row = [](const OpQuery&) {
    Rule rule;
    rule.outs = {{{}, {}}};
    rule.add_strategy({Replicate()}, {Replicate()});
    return rule;
  };
  EXPECT_EQ(registry.version(), 0u);
  registry.add("my::op", "mine", one_row);
  EXPECT_EQ(registry.version(), 1u);
  EXPECT_EQ(registry.find("my::op")->family, "mine");
  EXPECT_EQ(registry.find("my::other"), nullptr);
  registry.same_as("my::other", "my::op");
  EXPECT_EQ(registry.version(), 2u);
  EXPECT_EQ(registry.find("my::other")->family, "mine");
  registry.add("my::op", "again", one_row);
  EXPECT_EQ(registry.find("my::op")->family, "again");
  EXPECT_EQ(registry.names(), (std::vector<std::string>{"my::op", "my::other"}));
  EXPECT_THROW(registry.same_as("my::third", "my::unknown"), UsageError);
}

TEST(Registry, MalformedStrategyIsAnInternalError) {
  Registry registry;
  registry.add("aten::relu", "mine", [](const OpQuery&) {
    Rule rule;
    rule.outs = {{{5, 3}, {}}};
    rule.add_strategy({Replicate(), Replicate()}, {Replicate()});
    return rule;
  });
  EXPECT_THROW(registry.find("aten::relu")->fn(call_query({"aten::relu", {numbers({5, 3})}, {}})), InternalError);
}

// A plain tensor of one element is always replicated.
TEST(Registry, StrategiesThatShardAPlainTensorAreDropped) {
  Sample sample{"aten::add.Tensor", {numbers({5, 3}), numbers({})}, {1}};
  auto rule = registry().find(sample.op)->fn(call_query(sample));
  EXPECT_GE(rule.strategies.size(), 3u);
  for (const auto& strategy : rule.strategies) EXPECT_EQ(strategy.in[1], Replicate());
}

TEST(OpQuery, ReadsDimsAndThrowsForBadOnes) {
  auto query = call_query({"aten::_softmax", {numbers({5, 3}), -1, false}, {}});
  EXPECT_EQ(query.dim_at(1, 2), 1);
  EXPECT_THROW(call_query({"aten::_softmax", {numbers({5, 3}), 2, false}, {}}).dim_at(1, 2), c10::IndexError);
  EXPECT_THROW(query.tensor(1), UsageError);
  EXPECT_EQ(query.find_tensor(1), nullptr);
}

}  // namespace
}  // namespace tessera::testing
