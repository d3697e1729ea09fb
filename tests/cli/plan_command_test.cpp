// `tessera plan`: its flags and output.
#include "tessera/base/error.h"
#include "tessera/cli/commands.h"
#include "tessera/testing/expect_error.h"

#include <gtest/gtest.h>

namespace tessera::cli {
namespace {

std::string plan(const std::string& arguments) {
  CLI::App app{"", "tessera"};
  add_plan_command(app);
  ::testing::internal::CaptureStdout();
  try {
    app.parse("plan " + arguments);
  } catch (...) {
    ::testing::internal::GetCapturedStdout();
    throw;
  }
  return ::testing::internal::GetCapturedStdout();
}

TEST(PlanCommand, PlansATrainingRun) {
  const auto text = plan("--model gpt-tiny --mesh dp=2,tp=2 --layers 2 --training.batch 8");
  EXPECT_CONTAINS(text, "on 4 ranks, mesh dp=2,tp=2: a step of 8 x 8 tokens");
  EXPECT_CONTAINS(text, "dp    all_reduce of gradients, in buckets");
  EXPECT_CONTAINS(text, "optimizer state");
  EXPECT_CONTAINS(plan("--ranks 1024 --batch 1024"), "on 1024 ranks, mesh dp=1024");
  EXPECT_CONTAINS(plan("--ranks 4 --fsdp"), "all_gather of parameters");
}

TEST(PlanCommand, ReportsATensorParallelPlan) {
  EXPECT_CONTAINS(plan("--model gpt-tiny --tp 4 --seq 8 --batch 2"), "gpt-tiny on tp=4, a batch of 2 x 8 tokens");
  EXPECT_CONTAINS(plan("--model gpt-tiny --print-plan"), "h.*.attn.c_attn = colwise(sections=3)");
  EXPECT_THROW(plan("--tp 0"), CLI::ValidationError);
  EXPECT_ERROR(UsageError, plan("--tp 2 --seq 65536 --batch 2"), "has more than 65536 tokens");
}

TEST(PlanCommand, ListsAllConfigErrors) {
  EXPECT_ERROR(UsageError, plan("--mesh dp=3,tp=8"),
               "this config cannot run:\n  a batch of 64 samples is not divisible by 3",
               "\n  gpt-tiny has 4 heads, which are not divisible by tp=8");
  EXPECT_ERROR(UsageError, plan("--mesh dp=2 --ranks 4"), "needs 2 ranks, but there are 4");
  EXPECT_ERROR(UsageError, plan("--mesh zz=2"), "unknown axis 'zz'");
  EXPECT_ERROR(UsageError, plan("--ranks 2 --model gpt-huge"), "gpt-huge");
}

}  // namespace
}  // namespace tessera::cli
