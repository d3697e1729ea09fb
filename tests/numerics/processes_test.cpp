#include "tessera/dtensor/dtensor.h"
#include "tessera/numerics/numerics.h"
#include "tessera/testing/spawn.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

namespace ts = tessera;

namespace {

// Subtrees travel over every backend for processes. A plain tensor has the bits of every sharding.
TEST(InvariantProcesses, SumsHaveTheBitsOfPlainTensorsOverEachBackend) {
  ts::testing::spawn_ranks_over_each(3, [](ts::testing::Rank& me) {
    const auto mesh = me.mesh("tp=3");
    for (const int64_t k : {96, 100}) {
      torch::manual_seed(k);
      const auto a = torch::randn({10, k}), b = torch::randn({k, 9});
      const ts::DistributeOptions own{.src_data_rank = std::nullopt};
      const auto a_sharded = ts::distribute_tensor(a, mesh, {ts::Shard(1)}, own);
      const auto b_sharded = ts::distribute_tensor(b, mesh, {ts::Shard(0)}, own);
      at::Tensor product, sum, expected_product, expected_sum;
      {
        const ts::NumericsScope scope(ts::Numerics::Invariant);
        product = torch::mm(a_sharded, b_sharded);
        sum = b_sharded.sum();
        expected_product = torch::mm(a, b);
        expected_sum = b.sum();
      }
      EXPECT_EQ(ts::Placements(ts::DTensor(product).placements()), ts::Placements({ts::Replicate()}));
      EXPECT_TRUE(torch::equal(ts::DTensor(product).to_local(), expected_product));
      EXPECT_TRUE(torch::equal(ts::DTensor(sum).to_local(), expected_sum));
    }
  });
}

}  // namespace
