// `tessera plan` as it is typed.
#include "tessera/base/error.h"
#include "tessera/cli/commands.h"
#include "tessera/testing/expect_error.h"

#include <gtest/gtest.h>

namespace tessera::cli {
namespace {

std::string say(const std::string& arguments) {
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

TEST(PlanCommand, OfATrainingByTheFlagsOfTrain) {
  const auto said = say("--model gpt-tiny --mesh dp=2,tp=2 --layers 2 --training.batch 8");
  EXPECT_SAYS(said, "on 4 ranks, mesh dp=2,tp=2: a step of 8 x 8 tokens");
  EXPECT_SAYS(said, "dp    all_reduce of gradients, in buckets");
  EXPECT_SAYS(said, "optimizer state");
  EXPECT_SAYS(say("--ranks 1024 --batch 1024"), "on 1024 ranks, mesh dp=1024");
  EXPECT_SAYS(say("--ranks 4 --fsdp"), "all_gather of parameters");
}

TEST(PlanCommand, OfLayersByTp) {
  EXPECT_SAYS(say("--model gpt-tiny --tp 4 --seq 8 --batch 2"), "gpt-tiny on tp=4, a batch of 2 x 8 tokens");
  EXPECT_SAYS(say("--model gpt-tiny --print-plan"), "h.*.attn.c_attn = colwise(sections=3)");
  EXPECT_ERROR(UsageError, say("--tp 0"), "a plan for 0 ranks");
}

TEST(PlanCommand, SaysEveryReasonAgainst) {
  EXPECT_ERROR(UsageError, say("--mesh dp=3,tp=8"), "this cannot run:\n  a batch of 64 samples does not divide by 3",
               "\n  gpt-tiny has 4 heads, which tp=8 does not divide");
  EXPECT_ERROR(UsageError, say("--mesh dp=2 --ranks 4"), "has 2 ranks, and 4 are there");
  EXPECT_ERROR(UsageError, say("--mesh pp=2"), "no axis 'pp'");
  EXPECT_ERROR(UsageError, say("--ranks 2 --model gpt-huge"), "gpt-huge");
}

}  // namespace
}  // namespace tessera::cli
