// Compiles and runs the block of docs/design/numerics.md.
#include "tessera/testing/ranks.h"

#include <gtest/gtest.h>
#include <tessera/tessera.h>
#include <torch/torch.h>

namespace numerics_page {

namespace ts = tessera;

// Made at its first use, because fully_shard() replaces the parameters.
struct LateOptimizer {
  ts::nn::Linear model;
  std::optional<ts::optim::SGD> made;
  void zero_grad() { made.emplace(model->parameters(), ts::optim::SGDOptions{.lr = 0.1}).zero_grad(); }
  void step() { made->step(); }
};

TEST(NumericsPage, BlocksRun) {
  ts::testing::run_ranks(2, [](ts::testing::Rank& me) {
    const auto mesh = me.mesh("dp=2");
    torch::manual_seed(7);
    ts::nn::Linear model(4, 4);
    LateOptimizer optimizer{model, {}};
    const auto x = torch::ones({24, 4}), y = torch::zeros({24, 4});
    const double rows_of_global_batch = 48;
    const auto loss_sum = [](const at::Tensor& a, const at::Tensor& b) { return ((a - b) * (a - b)).sum(); };
#include "numerics_1.inc"
    EXPECT_EQ(shards.count(), 24);
  });
}

}  // namespace numerics_page
