#include "tessera/launch/detail/rank_plan.h"

#include <gtest/gtest.h>

#include <map>
#include <sstream>

namespace tessera::launch {
namespace {

std::map<std::string, std::string> variables(const RankPlan& plan) {
  return {plan.variables.begin(), plan.variables.end()};
}

TEST(RankPlan, SetsTheVariablesOfTorchrun) {
  // The second of three hosts with 2, 3 and 1 ranks.
  const HostAssignment assignment{1, 3, 2, 3, 6, "head", 29400, "run"};
  RankSettings settings;
  settings.restarts = 1, settings.max_restarts = 4;
  settings.cores = {0, 1, 2, 3, 4, 5, 6};
  settings.error_dir = "/e";
  settings.job_secret = "the secret";
  const auto plans = plan_ranks(assignment, settings);
  ASSERT_EQ(plans.size(), 3u);
  EXPECT_EQ(plans[2].rank, 4);
  EXPECT_EQ(plans[2].local_rank, 2);
  EXPECT_TRUE(plans[2].cores.empty());
  const std::map<std::string, std::string> expected{{"RANK", "4"},
                                                    {"WORLD_SIZE", "6"},
                                                    {"LOCAL_RANK", "2"},
                                                    {"LOCAL_WORLD_SIZE", "3"},
                                                    {"GROUP_RANK", "1"},
                                                    {"GROUP_WORLD_SIZE", "3"},
                                                    {"ROLE_NAME", "default"},
                                                    {"ROLE_RANK", "4"},
                                                    {"ROLE_WORLD_SIZE", "6"},
                                                    {"MASTER_ADDR", "head"},
                                                    {"MASTER_PORT", "29400"},
                                                    {"TORCHELASTIC_RUN_ID", "run"},
                                                    {"TORCHELASTIC_RESTART_COUNT", "1"},
                                                    {"TORCHELASTIC_MAX_RESTARTS", "4"},
                                                    {"TORCHELASTIC_USE_AGENT_STORE", "True"},
                                                    {"TORCHELASTIC_ERROR_FILE", "/e/rank_4.1.json"},
                                                    {"TESSERA_RUN", "1"},
                                                    {"TESSERA_JOB_SECRET", "the secret"},
                                                    {"OMP_NUM_THREADS", "2"}};
  EXPECT_EQ(variables(plans[2]), expected);
  std::ostringstream text;
  text << plans[2];
  EXPECT_NE(text.str().find(" TESSERA_JOB_SECRET=(set)"), std::string::npos) << text.str();
  EXPECT_EQ(text.str().find("the secret"), std::string::npos) << text.str();
}

TEST(RankPlan, ThreadsDefaultToCoresPerRank) {
  const auto threads = [](int64_t ranks, RankSettings settings) {
    settings.cores = {0, 1, 2, 3};
    const auto all = variables(plan_ranks({.nproc_per_node = ranks, .world_size = ranks}, settings)[0]);
    return all.contains("OMP_NUM_THREADS") ? all.at("OMP_NUM_THREADS") : "inherited";
  };
  EXPECT_EQ(threads(1, {}), "4");
  EXPECT_EQ(threads(3, {}), "1");
  EXPECT_EQ(threads(9, {}), "1");
  EXPECT_EQ(threads(2, {.user_set = {"OMP_NUM_THREADS"}}), "inherited");
  EXPECT_EQ(threads(2, {.threads_per_rank = 7, .user_set = {"OMP_NUM_THREADS"}}), "7");
}

TEST(RankPlan, OneHostUsesLoopback) {
  EXPECT_EQ(variables(plan_ranks({}, {})[0]).at("TESSERA_GLOO_HOST"), "127.0.0.1");
  EXPECT_FALSE(variables(plan_ranks({}, {.user_set = {"TESSERA_GLOO_HOST"}})[0]).contains("TESSERA_GLOO_HOST"));
  EXPECT_FALSE(variables(plan_ranks({.nnodes = 2}, {})[0]).contains("TESSERA_GLOO_HOST"));
}

TEST(RankPlan, CoresAreSplitAmongRanks) {
  using Cores = std::vector<int>;
  const Cores five{0, 2, 4, 6, 8};
  EXPECT_EQ(cores_of(0, 2, five), (Cores{0, 2}));
  EXPECT_EQ(cores_of(1, 2, five), (Cores{4, 6, 8}));
  EXPECT_EQ(cores_of(6, 7, five), (Cores{2}));  // 7 ranks on 5 cores: 0 2 4 6 8 0 2
  EXPECT_EQ(plan_ranks({.nproc_per_node = 2}, {.pin = true, .cores = five})[1].cores, (Cores{4, 6, 8}));
}

}  // namespace
}  // namespace tessera::launch
