#include "tessera/train/detail/drift.h"

#include "tessera/testing/expect_error.h"
#include "tests/train/tiny_run.h"

#include <sstream>

namespace tessera::train {
namespace {

TrainConfig drifting() {
  auto config = tiny();
  config.model = {.name = "gpt-tiny", .max_seq_len = 16, .layers = 2, .heads = 6, .dim = 48};
  config.training.batch = 24;
  config.guard.checksum_every = 0;
  return config;
}

// The predicted bound holds, and is not more than 1000 times the drift.
TEST(InvariantDrift, IsBelowThePredictedBound) {
  for (const std::string mesh : {"", "dp=2", "tp=2"}) {
    auto config = drifting();
    config.parallel.mesh = mesh;
    run_ranks(mesh.empty() ? 1 : 2, [&](Rank& me) {
      const auto report = measure_drift(config, me.world, 8);
      ASSERT_EQ(report.steps.size(), 8);
      double largest = 0, largest_loss = 0, bound_of_losses = 0;
      for (const auto& step : report.steps) {
        const double loss = std::abs(step.loss - step.invariant_loss);
        EXPECT_LE(loss, step.loss_bound) << mesh << " " << step.step;
        EXPECT_LE(step.weights, step.weights_bound) << mesh << " " << step.step;
        EXPECT_LE(step.weights_bound, 1000 * step.weights) << mesh << " " << step.step;
        largest = std::max(largest, step.weights);
        largest_loss = std::max(largest_loss, loss);
        bound_of_losses = std::max(bound_of_losses, step.loss_bound);
      }
      EXPECT_GT(largest, 0);
      EXPECT_LE(bound_of_losses, 10000 * largest_loss) << mesh;  // a loss of 5 has steps of 4.8e-7
      if (me.rank != 0) return;
      std::ostringstream text;
      text << report;
      EXPECT_CONTAINS(text.str(), "predicted bound");
      if (mesh.empty()) std::cout << text.str();
    });
  }
}

TEST(InvariantDrift, ARunWithoutAnInvariantFormIsRefused) {
  run_ranks(1, [](Rank& me) {
    auto config = drifting();
    config.training.numerics = "invariant";
    EXPECT_ERROR(UsageError, measure_drift(config, me.world, 1), "metrics.compare_numerics", "training.numerics");
    config.training.numerics = "default";
    config.model.dropout = 0.1;
    EXPECT_ERROR(UsageError, measure_drift(config, me.world, 1), "does not cover dropout");
  });
}

}  // namespace
}  // namespace tessera::train
