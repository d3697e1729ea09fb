// The tables of visualize_sharding, written out.
#include "tessera/debug/visualize_sharding.h"

#include "tessera/base/error.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/testing/ranks.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>

namespace tessera {
namespace {

using testing::Rank;
using testing::run_ranks;

// The table of ones(sizes) with the given placements, which must be equal on all ranks.
void expect_table(const std::string& mesh, Placements placements, std::vector<int64_t> sizes,
                  const std::string& expected) {
  int64_t n = 1;
  for (auto extent : parse_mesh_shape(mesh).shape) n *= extent;
  run_ranks(n, [&](Rank& me) {
    EXPECT_EQ(visualize_sharding(distribute_tensor(at::ones(sizes), me.mesh(mesh), placements)), expected)
        << "rank " << me.rank;
  });
}

TEST(VisualizeSharding, OneRank) {
  expect_table("tp=1", {Shard(0)}, {4}, R"(f32[4][S(0)] on mesh(tp=1)
         Col 0-0
-------  ---------
Row 0-3  cpu:0
)");
}

TEST(VisualizeSharding, UnevenRows) {
  expect_table("tp=4", {Shard(0)}, {10, 4}, R"(f32[10, 4][S(0)] on mesh(tp=4)
         Col 0-3
-------  ---------
Row 0-2  cpu:0
Row 3-5  cpu:1
Row 6-8  cpu:2
Row 9-9  cpu:3
)");
}

TEST(VisualizeSharding, RanksWithoutElementsAreListed) {
  expect_table("tp=4", {Shard(0)}, {5}, R"(f32[5][S(0)] on mesh(tp=4)
         Col 0-0
-------  ---------
Row 0-1  cpu:0
Row 2-3  cpu:1
Row 4-4  cpu:2
nothing on cpu:3
)");
}

TEST(VisualizeSharding, RowsAndColumns) {
  expect_table("dp=2,tp=2", {Shard(0), Shard(1)}, {8, 12}, R"(f32[8, 12][S(0), S(1)] on mesh(dp=2,tp=2)
         Col 0-5    Col 6-11
-------  ---------  ----------
Row 0-3  cpu:0      cpu:1
Row 4-7  cpu:2      cpu:3
)");
}

TEST(VisualizeSharding, Replicas) {
  expect_table("dp=2,tp=2", {Replicate(), Shard(1)}, {8, 12}, R"(f32[8, 12][R, S(1)] on mesh(dp=2,tp=2)
         Col 0-5    Col 6-11
-------  ---------  ----------
Row 0-7  cpu:0,2    cpu:1,3
)");
}

TEST(VisualizeSharding, TwoAxesShardOneDim) {
  expect_table("dp=2,tp=2", {Shard(0), Shard(0)}, {10, 3}, R"(f32[10, 3][S(0), S(0)] on mesh(dp=2,tp=2)
         Col 0-2
-------  ---------
Row 0-2  cpu:0
Row 3-4  cpu:1
Row 5-7  cpu:2
Row 8-9  cpu:3
)");
}

TEST(VisualizeSharding, StridedShardSwapsTheInnerRanks) {
  expect_table("dp=2,tp=2", {StridedShard(0, 2), Shard(0)}, {8, 3}, R"(f32[8, 3][SS(0,2), S(0)] on mesh(dp=2,tp=2)
         Col 0-2
-------  ---------
Row 0-1  cpu:0
Row 2-3  cpu:2
Row 4-5  cpu:1
Row 6-7  cpu:3
)");
}

TEST(VisualizeSharding, StridedShardAloneGivesARankSeveralRanges) {
  expect_table("tp=2", {StridedShard(0, 2)}, {8}, R"(f32[8][SS(0,2)] on mesh(tp=2)
         Col 0-0
-------  ---------
Row 0-1  cpu:0
Row 2-3  cpu:1
Row 4-5  cpu:0
Row 6-7  cpu:1
)");
}

TEST(VisualizeSharding, PartialAxesAreListed) {
  run_ranks(2, [](Rank& me) {
    const auto t = DTensor::from_local(at::ones({4}), me.mesh("tp=2"), {Partial()});
    EXPECT_EQ(visualize_sharding(t), R"(f32[4][P(sum)] on mesh(tp=2)
         Col 0-0
-------  ---------
Row 0-3  cpu:0,1
partial over tp: P(sum)
)");
  });
}

TEST(VisualizeSharding, MoreThanTwoDimsNeedDims) {
  run_ranks(2, [](Rank& me) {
    const auto mesh = me.mesh("tp=2");
    const auto t = distribute_tensor(at::ones({2, 3, 4}), mesh, {Shard(2)});
    try {
      visualize_sharding(t);
      FAIL() << "drew three dims";
    } catch (const UsageError& e) {
      EXPECT_NE(std::string(e.what()).find("visualize_sharding(t, {0, 2})"), std::string::npos) << e.what();
    }
    EXPECT_EQ(visualize_sharding(t, {0, -1}), R"(f32[2, 3, 4][S(2)] on mesh(tp=2)
         Col 0-1    Col 2-3
-------  ---------  ---------
Row 0-1  cpu:0      cpu:1
)");
    EXPECT_THROW(visualize_sharding(t, {0, 3}), UsageError);
    EXPECT_THROW(visualize_sharding(t, {1, 1}), UsageError);
    EXPECT_THROW(visualize_sharding(t, {0, 1, 2}), UsageError);
    EXPECT_THROW(visualize_sharding(at::ones({2})), UsageError);
    EXPECT_THROW(visualize_sharding({4, 4}, mesh, {Shard(0), Shard(1)}), UsageError);
  });
}

TEST(VisualizeSharding, SizesAndPlacementsWithoutATensor) {
  run_ranks(2, [](Rank& me) {
    EXPECT_EQ(visualize_sharding({6, 2}, me.mesh("tp=2"), {Shard(-2)}), R"([6, 2][S(0)] on mesh(tp=2)
         Col 0-1
-------  ---------
Row 0-2  cpu:0
Row 3-5  cpu:1
)");
  });
}

}  // namespace
}  // namespace tessera
