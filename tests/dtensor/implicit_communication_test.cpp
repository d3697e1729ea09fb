// A training step without explicit redistribution posts no more collectives than a hand-written one. With a bad cost
// model the greedy choice per op would post 34 instead of 2.
#include "small_models.h"

#include "tessera/base/error.h"
#include "tessera/debug/comm_debug_mode.h"
#include "tessera/dtensor/policy.h"
#include "tessera/testing/ranks.h"

#include <gtest/gtest.h>

namespace tessera::test {
namespace {

CommCounts counts_of_a_step(Model model) {
  train(model, Optimizer::Sgd, 1);
  CommDebugMode mode;
  train(model, Optimizer::Sgd, 1);
  mode.exit();
  return mode.get_comm_counts();
}

TEST(ImplicitCommunication, NoMoreCollectivesThanByHand) {
  struct {
    Model start;
    const char* mesh;
    int ranks;
    int64_t tensor_parallel;  // all-reduces over tp that a hand-written step has
  } cases[] = {{mlp(), "tp=2", 2, 1},
               {mlp(), "tp=3", 3, 1},
               {transformer(), "tp=2", 2, 4},
               {transformer(), "tp=3", 3, 4},
               {transformer(), "dp=2,tp=2", 4, 0}};
  for (const auto& c : cases) {
    SCOPED_TRACE(c.mesh);
    testing::run_ranks(c.ranks, [&](testing::Rank& me) {
      const auto mesh = me.mesh(c.mesh);
      const auto implicit = counts_of_a_step(distribute(c.start, mesh));
      const auto explicitly = counts_of_a_step(by_hand(distribute(c.start, mesh)));
      EXPECT_LE(implicit.total(), explicitly.total()) << implicit << " against " << explicitly;
      if (c.tensor_parallel) {
        EXPECT_EQ(implicit, (CommCounts{{"c10d_functional.all_reduce", c.tensor_parallel}}));
      }
    });
  }
}

TEST(ImplicitCommunication, AHandWrittenStepPassesUnderCommPolicyError) {
  const auto start = mlp();
  testing::run_ranks(2, [&](testing::Rank& me) {
    auto model = by_hand(distribute(start, me.mesh("tp=2")));
    CommPolicyScope strict(CommPolicy::Error);
    train(model, Optimizer::Sgd, 2);
    auto implicit = distribute(start, me.mesh("tp=2"));
    EXPECT_THROW(train(implicit, Optimizer::Sgd, 1), ShardingError);
  });
}

}  // namespace
}  // namespace tessera::test
