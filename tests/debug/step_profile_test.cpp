// The profile of a training step: what is recorded, how it is summed up, and that clocks of machines are aligned.
#include "tessera/debug/detail/step_profile.h"

#include "tessera/base/detail/json.h"
#include "tessera/base/error.h"
#include "tessera/debug/detail/step_profiler.h"
#include "tessera/testing/expect_error.h"
#include "tessera/testing/ranks.h"

#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>

namespace tessera::debug {
namespace {

using testing::Rank;
using testing::run_ranks;

//  time        0    10   20   30   40   50   60   70   80   90  100
//  ops         |mm------------|add-|              |relu|
//  all_reduce       |post|..............|wait-----|
StepProfile drawn_profile() {
  StepProfile p;
  p.rank = 1, p.step = 3, p.start = 1000, p.duration = 100;
  p.names = {"aten::mm", "aten::add", "aten::relu", "tessera::wait", "allreduce_"};
  p.ops = {{0, 0, 0, 30}, {4, 0, 10, 10}, {1, 0, 30, 10}, {3, 0, 50, 20}, {2, 0, 70, 10}};
  p.collectives = {{"all_reduce", "dp", 7, 4096, 10, 20, 50, 70}};
  p.memory = {{0, 0}, {5, 64}, {80, 0}};
  return p;
}

TEST(StepProfile, ReadsBackWhatItWrites) {
  const auto profile = drawn_profile();
  EXPECT_EQ(parse_step_profile(to_json(profile), "p"), profile);
}

TEST(StepProfile, RefusesOtherFiles) {
  EXPECT_ERROR(UsageError, parse_step_profile("{", "'rank-0.json'"), "'rank-0.json'", "not valid JSON");
  EXPECT_ERROR(UsageError, parse_step_profile("{}", "'rank-0.json'"), "rank");
  auto broken = drawn_profile();
  broken.ops[0].name = 9;
  EXPECT_ERROR(UsageError, parse_step_profile(to_json(broken), "'rank-0.json'"), "op 0 has name 9 of 5");
}

TEST(StepProfile, SelfTimeIsWithoutInnerOpsAndCollectives) {
  const std::vector<OpTime> expected = {{"aten::mm", 1, 20}, {"aten::add", 1, 10}, {"aten::relu", 1, 10}};
  EXPECT_EQ(time_by_op(drawn_profile()), expected);
}

TEST(StepProfile, ACollectiveIsExposedWhileItsRankIsBlocked) {
  const std::vector<CollectiveTime> expected = {{"all_reduce", "dp", 1, 4096, 60, 30}};
  EXPECT_EQ(time_by_collective(drawn_profile()), expected);
}

TEST(StepProfile, TheTimelineHasNoOverlaps) {
  using Kind = ProfileInterval::Kind;
  const std::vector<ProfileInterval> expected = {
      {Kind::Op, 0, 10}, {Kind::Exposed, 10, 20}, {Kind::Op, 20, 40}, {Kind::Exposed, 50, 70}, {Kind::Op, 70, 80}};
  EXPECT_EQ(timeline(drawn_profile(), 1), expected);
}

TEST(StepProfile, TheTraceHasAProcessPerRankOnOneClock) {
  auto first = drawn_profile(), second = drawn_profile();
  first.rank = 0, second.start += 500;
  const auto trace = Json::parse(chrome_trace({first, second}), "the trace");
  std::map<int64_t, double> step_start;
  int64_t collectives = 0;
  for (const auto& event : trace.at("traceEvents").items()) {
    const auto& name = event.at("name").text();
    if (name == "step 3") step_start[event.at("pid").number()] = *event.at("ts").get_if<double>();
    if (name == "all_reduce dp") collectives++;
  }
  EXPECT_EQ(step_start, (std::map<int64_t, double>{{0, 0.0}, {1, 0.5}}));
  EXPECT_EQ(collectives, 2);
}

TEST(StepProfiler, RecordsOpsCollectivesAndMemoryOfItsRank) {
  for (int n : {1, 2, 3})
    run_ranks(n, [&](Rank& me) {
      auto x = at::ones({16, 16});
      StepProfiler profiler;
      profiler.start();
      {
        auto y = at::mm(x, x);
        me.group()->all_reduce(y, ReduceOp::Sum).wait();
      }
      const auto profile = profiler.stop();
      at::mm(x, x);  // not recorded
      const auto ops = time_by_op(profile);
      const auto mm = std::find_if(ops.begin(), ops.end(), [](const auto& op) { return op.name == "aten::mm"; });
      ASSERT_NE(mm, ops.end());
      EXPECT_EQ(mm->calls, 1);
      ASSERT_EQ(profile.collectives.size(), 1u);
      const auto& collective = profile.collectives[0];
      EXPECT_EQ(collective.kind, "all_reduce");
      EXPECT_EQ(collective.bytes, 16 * 16 * 4);
      EXPECT_LE(collective.posted, collective.started);
      EXPECT_LE(collective.started, collective.waited);
      EXPECT_LE(collective.waited, collective.done);
      int64_t most = 0;
      for (const auto& [time, bytes] : profile.memory) most = std::max(most, bytes);
      EXPECT_GE(most, 16 * 16 * 4);
      EXPECT_EQ(profile.memory.back().second, 0);
      EXPECT_EQ(parse_step_profile(to_json(profile), "p"), profile);
    });
}

TEST(AlignClock, RanksOfAMachineShareItsOffsetAndTheErrorIsBounded) {
  // Ranks 2 and 3 are on a machine whose clock is five seconds ahead.
  constexpr int64_t kAhead = 5'000'000'000;
  run_ranks(4, [&](Rank& me) {
    const bool other = me.rank >= 2;
    const auto clock = align_clock(me.group(), other ? "b" : "a", [other] {
      const auto now = std::chrono::steady_clock::now().time_since_epoch();
      return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count() + (other ? kAhead : 0);
    });
    if (other) {
      EXPECT_LE(std::abs(clock.offset + kAhead), clock.error);
    } else {
      EXPECT_EQ(clock.offset, 0);
      EXPECT_EQ(clock.error, 0);
    }
  });
}

TEST(AlignClock, RanksOfThisMachineNeedNoOffset) {
  run_ranks(2, [](Rank& me) { EXPECT_EQ(align_clock(me.group()).offset, 0); });
}

}  // namespace
}  // namespace tessera::debug
