#include "tessera/tensor_parallel/plan.h"

#include "tessera/base/error.h"
#include "tessera/testing/expect_error.h"

#include <gtest/gtest.h>

namespace tessera {
namespace {

using testing::message_of;

const std::vector<std::string> kModel = {"",         "layers",      "layers.0",      "layers.0.up", "layers.0.down",
                                         "layers.1", "layers.1.up", "layers.1.down", "norm"};

void takes_a_plan(const Plan& plan, size_t size) { EXPECT_EQ(plan.size(), size); }

TEST(Plan, IsWrittenAsAMapOrAsOneStyle) {
  takes_a_plan({{"up", ColwiseParallel()}, {"down", RowwiseParallel()}}, 2);
  takes_a_plan({{"up", ColwiseParallel()}}, 1);
  takes_a_plan(ColwiseParallel{.output_layouts = Replicate()}, 1);
  takes_a_plan({}, 0);
  EXPECT_EQ(Plan(SequenceParallel()), (Plan{{"", SequenceParallel()}}));
}

TEST(Plan, KeepsTheOrderAndTheStyles) {
  Plan plan = {{"b", ColwiseParallel()}, {"a", RowwiseParallel()}};
  plan.add("c", SequenceParallel());
  EXPECT_EQ(plan[0].pattern, "b");
  EXPECT_EQ(plan[2].pattern, "c");
  EXPECT_EQ(*plan.find("a"), Style(RowwiseParallel()));
  EXPECT_EQ(plan.find("d"), nullptr);
  EXPECT_NE(plan, (Plan{{"a", RowwiseParallel()}, {"b", ColwiseParallel()}, {"c", SequenceParallel()}}));
}

TEST(Plan, ABadEntryLeavesItAsItWas) {
  Plan plan = {{"a", ColwiseParallel()}};
  EXPECT_SAYS(message_of<UsageError>([&] { plan.add("a", RowwiseParallel()); }),
              "plan entry 'a': rowwise is asked for, and colwise was before; give a pattern one style");
  EXPECT_SAYS(message_of<UsageError>([&] { plan.add("b", PrepareModuleInput()); }), "prepare_input: no layouts");
  EXPECT_EQ(plan, (Plan{{"a", ColwiseParallel()}}));
}

TEST(Plan, ResolvesToModules) {
  const Plan plan = {{"layers.*.down", RowwiseParallel()},
                     {"", PrepareModuleOutput{.output_layouts = Shard(0), .desired_output_layouts = Replicate()}},
                     {"layers.0.up", ColwiseParallel()}};
  EXPECT_EQ(resolve(plan, kModel),
            (std::vector<PlannedModule>{{"layers.0.down", 0}, {"layers.1.down", 0}, {"", 1}, {"layers.0.up", 2}}));
  EXPECT_TRUE(resolve(Plan(), kModel).empty());
}

TEST(Plan, RefusesAModuleMatchedTwice) {
  const Plan plan = {{"layers.*.up", ColwiseParallel()}, {"layers.1.*", RowwiseParallel()}};
  EXPECT_SAYS(message_of<UsageError>([&] { resolve(plan, kModel); }),
              "module 'layers.1.up' is matched twice, by 'layers.*.up' = colwise and by 'layers.1.*' = rowwise");
}

TEST(Plan, RefusesOrSkipsAPatternWithoutModule) {
  const Plan plan = {{"layers.*.upp", ColwiseParallel()}, {"norm", SequenceParallel()}};
  EXPECT_SAYS(message_of<UsageError>([&] { resolve(plan, kModel); }),
              "plan entry 'layers.*.upp' matches no module: no child of 'layers.0' matches 'upp'; it has up, down. "
              "Nearest names: layers.0.up");
  struct Keep : c10::WarningHandler {
    void process(const c10::Warning& warning) override { said += warning.msg(); }
    std::string said;
  } keep;
  {
    c10::WarningUtils::WarningHandlerGuard guard(&keep);
    EXPECT_EQ(resolve(plan, kModel, Unmatched::Warn), (std::vector<PlannedModule>{{"norm", 1}}));
  }
  EXPECT_SAYS(keep.said, "plan entry 'layers.*.upp' matches no module");
  EXPECT_SAYS(keep.said, "The entry is skipped.");
}

}  // namespace
}  // namespace tessera
