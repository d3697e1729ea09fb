#include "tessera/pipelining/detail/simulate.h"

#include <gtest/gtest.h>

#include "tessera/base/error.h"
#include "tessera/pipelining/detail/lowering.h"
#include "tessera/pipelining/detail/schedules.h"
#include "tessera/testing/expect_error.h"

namespace tessera::pipelining {
namespace {

Simulation simulate_schedule(const std::string& name, const PipelineShape& shape, const StageCost& cost = {}) {
  return simulate(lower_schedule(compute_schedule(name, shape), stage_ranks(name, shape), shape.microbatches),
                  std::vector<StageCost>(shape.stages(), cost));
}

// The bubble of 1F1B and of GPipe is (ranks - 1) / (microbatches + ranks - 1), whatever a stage costs.
TEST(Simulate, BubbleOf1F1BIsItsFormula) {
  for (const int64_t ranks : {1, 2, 4, 8})
    for (const int64_t microbatches : {8, 12, 32}) {
      const double formula = static_cast<double>(ranks - 1) / static_cast<double>(microbatches + ranks - 1);
      for (const char* name : {"GPipe", "1F1B"})
        EXPECT_NEAR(simulate_schedule(name, {ranks, 1, microbatches}, {1, 0.7, 0.9}).bubble(), formula, 1e-12) << name;
    }
}

TEST(Simulate, ZeroBubbleSchedulesWaitLess) {
  const double plain = simulate_schedule("1F1B", {4, 1, 16}).bubble();
  const double interleaved = simulate_schedule("Interleaved1F1B", {4, 2, 16}).bubble();
  const double split = simulate_schedule("InterleavedZeroBubble", {4, 2, 16}).bubble();
  const double v_shaped = simulate_schedule("ZBVZeroBubble", {4, 2, 16}).bubble();
  EXPECT_LT(interleaved, plain);
  EXPECT_LT(split, interleaved);
  EXPECT_LT(v_shaped, 0.06);
}

TEST(Simulate, PeakIsTheNumberOfKeptMicrobatches) {
  const Simulation gpipe = simulate_schedule("GPipe", {4, 1, 8});
  const Simulation one_f_one_b = simulate_schedule("1F1B", {4, 1, 8});
  for (int64_t rank = 0; rank < 4; ++rank) {
    EXPECT_EQ(gpipe.ranks[rank].peak, 8);
    EXPECT_EQ(one_f_one_b.ranks[rank].peak, 4 - rank);
  }
}

TEST(Simulate, EveryScheduleRuns) {
  for (const std::string& name : schedule_names())
    for (const int64_t ranks : {1, 2, 4, 8})
      for (const int64_t microbatches : {16, 32}) {
        const PipelineShape shape{ranks, name == "GPipe" || name == "1F1B" ? 1 : 2, microbatches};
        const Simulation simulation = simulate_schedule(name, shape, {1, 1, 1, 0.1});
        for (const RankTimeline& rank : simulation.ranks)
          EXPECT_NEAR(rank.busy, 3 * microbatches * shape.stages_per_rank, 1e-9) << name << " on " << ranks << " ranks";
      }
}

TEST(Simulate, MissingSendIsNamed) {
  const ActionTable planted = parse_csv("0F0,0B0\n1RECV_F0,1F0,1B0\n");
  EXPECT_ERROR(UsageError, simulate(planted, {StageCost{}, StageCost{}}), "rank 1", "1F0");
  EXPECT_ERROR(UsageError, simulate(parse_csv("3F0\n"), {StageCost{}}), "3F0", "1 stages");
}

TEST(Simulate, DrawingHasABoxPerAction) {
  const std::string svg = to_svg(simulate_schedule("1F1B", {2, 1, 3}));
  int64_t boxes = 0;
  for (size_t at = svg.find("<rect"); at != std::string::npos; at = svg.find("<rect", at + 1)) ++boxes;
  EXPECT_EQ(boxes, 12);
}

}  // namespace
}  // namespace tessera::pipelining
