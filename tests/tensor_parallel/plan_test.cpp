#include "tessera/tensor_parallel/plan.h"

#include "tessera/base/error.h"
#include "tessera/testing/expect_error.h"

#include <gtest/gtest.h>

namespace tessera {
namespace {

using testing::error_message;

const std::vector<std::string> kModuleNames = {
    "", "layers", "layers.0", "layers.0.up", "layers.0.down", "layers.1", "layers.1.up", "layers.1.down", "norm"};

void expect_size(const Plan& plan, size_t size) { EXPECT_EQ(plan.size(), size); }

TEST(Plan, IsConstructedFromEntriesOrFromOneStyle) {
  expect_size({{"up", ColwiseParallel()}, {"down", RowwiseParallel()}}, 2);
  expect_size({{"up", ColwiseParallel()}}, 1);
  expect_size(ColwiseParallel{.output_layouts = Replicate()}, 1);
  expect_size({}, 0);
  EXPECT_EQ(Plan(SequenceParallel()), (Plan{{"", SequenceParallel()}}));
}

TEST(Plan, KeepsTheOrderOfEntries) {
  Plan plan = {{"b", ColwiseParallel()}, {"a", RowwiseParallel()}};
  plan.add("c", SequenceParallel());
  EXPECT_EQ(plan[0].pattern, "b");
  EXPECT_EQ(plan[2].pattern, "c");
  EXPECT_EQ(*plan.find("a"), Style(RowwiseParallel()));
  EXPECT_EQ(plan.find("d"), nullptr);
  EXPECT_NE(plan, (Plan{{"a", RowwiseParallel()}, {"b", ColwiseParallel()}, {"c", SequenceParallel()}}));
}

TEST(Plan, AnInvalidEntryThrowsAndDoesNotChangeThePlan) {
  Plan plan = {{"a", ColwiseParallel()}};
  EXPECT_CONTAINS(error_message<UsageError>([&] { plan.add("a", RowwiseParallel()); }),
                  "plan entry 'a': the new style is rowwise, but the pattern already has colwise; use one style per "
                  "pattern");
  EXPECT_CONTAINS(error_message<UsageError>([&] { plan.add("b", PrepareModuleInput()); }), "prepare_input: no layouts");
  EXPECT_EQ(plan, (Plan{{"a", ColwiseParallel()}}));
}

TEST(Plan, ResolveReturnsTheMatchingModules) {
  const Plan plan = {{"layers.*.down", RowwiseParallel()},
                     {"", PrepareModuleOutput{.output_layouts = Shard(0), .desired_output_layouts = Replicate()}},
                     {"layers.0.up", ColwiseParallel()}};
  EXPECT_EQ(resolve(plan, kModuleNames),
            (std::vector<PlannedModule>{{"layers.0.down", 0}, {"layers.1.down", 0}, {"", 1}, {"layers.0.up", 2}}));
  EXPECT_TRUE(resolve(Plan(), kModuleNames).empty());
}

TEST(Plan, AModuleThatMatchesTwoEntriesThrows) {
  const Plan plan = {{"layers.*.up", ColwiseParallel()}, {"layers.1.*", RowwiseParallel()}};
  EXPECT_CONTAINS(error_message<UsageError>([&] { resolve(plan, kModuleNames); }),
                  "module 'layers.1.up' matches two entries, 'layers.*.up' = colwise and 'layers.1.*' = rowwise");
}

TEST(Plan, AnUnmatchedPatternThrowsOrWarns) {
  const Plan plan = {{"layers.*.upp", ColwiseParallel()}, {"norm", SequenceParallel()}};
  EXPECT_CONTAINS(error_message<UsageError>([&] { resolve(plan, kModuleNames); }),
                  "plan entry 'layers.*.upp' matches no module: no child of 'layers.0' matches 'upp'; it has up, down. "
                  "Nearest names: layers.0.up");
  struct CollectWarnings : c10::WarningHandler {
    void process(const c10::Warning& warning) override { text += warning.msg(); }
    std::string text;
  } warnings;
  {
    c10::WarningUtils::WarningHandlerGuard guard(&warnings);
    EXPECT_EQ(resolve(plan, kModuleNames, Unmatched::Warn), (std::vector<PlannedModule>{{"norm", 1}}));
  }
  EXPECT_CONTAINS(warnings.text, "plan entry 'layers.*.upp' matches no module");
  EXPECT_CONTAINS(warnings.text, "The entry is skipped.");
}

}  // namespace
}  // namespace tessera
