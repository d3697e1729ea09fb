#include "tessera/data_parallel/fsdp/shard_layout.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <gtest/gtest.h>

namespace tessera::data_parallel::fsdp {
namespace {

const std::vector<Extent> kSome{{{5, 3}, 0}, {{4}, 0}, {{2, 3, 2}, 1}, {{1}, 0}};

TEST(ShardLayout, FlatCutsTheWholeIntoEqualLengths) {
  const auto layout = ShardLayout::flat(kSome, 3);  // 15 + 4 + 12 + 1 = 32
  EXPECT_EQ(layout.shard_numel(), 11);
  EXPECT_EQ(layout.in_shard(0, 0), (Part{0, 11}));
  EXPECT_EQ(layout.in_shard(0, 1), (Part{0, 4}));
  EXPECT_EQ(layout.in_shard(0, 2), (Part{0, 0}));
  EXPECT_EQ(layout.in_shard(1, 1), (Part{4, 4}));
  EXPECT_EQ(layout.in_shard(2, 1), (Part{8, 3}));
  EXPECT_EQ(layout.in_parameter(2, 2), (Part{3, 9}));
  EXPECT_EQ(layout.in_shard(3, 2), (Part{9, 1}));
}

TEST(ShardLayout, FlatAligns) {
  const auto layout = ShardLayout::flat(kSome, 2, 4);  // 16 + 4 + 12 + 1 = 33
  EXPECT_EQ(layout.shard_numel(), 17);
  EXPECT_EQ(layout.in_shard(1, 0), (Part{16, 1}));
  EXPECT_EQ(layout.in_shard(1, 1), (Part{0, 3}));
}

TEST(ShardLayout, PerParameterCutsEach) {
  const auto layout = ShardLayout::per_parameter(kSome, 3);
  EXPECT_EQ(layout.shard_numel(), 2 * 3 + 2 + 2 * 1 * 2 + 1);
  EXPECT_EQ(layout.piece_sizes(0, 2), (std::vector<int64_t>{1, 3}));
  EXPECT_EQ(layout.piece_sizes(1, 2), (std::vector<int64_t>{0}));
  EXPECT_EQ(layout.piece_sizes(2, 1), (std::vector<int64_t>{2, 1, 2}));
  EXPECT_EQ(layout.in_shard(3, 1), (Part{12, 0}));
}

TEST(ShardLayout, ScatterAndAssembleAreInverse) {
  for (const int64_t ranks : {1, 2, 3, 4})
    for (const bool flat : {true, false}) {
      const auto layout = flat ? ShardLayout::flat(kSome, ranks, 4) : ShardLayout::per_parameter(kSome, ranks);
      auto gathered = at::full({layout.gathered_numel()}, -1.0);
      std::vector<at::Tensor> wholes;
      double next = 0;
      for (const auto& extent : kSome) {
        int64_t n = 1;
        for (const int64_t size : extent.sizes) n *= size;
        wholes.push_back(at::arange(next, next + static_cast<double>(n), at::kFloat).view(extent.sizes));
        next += static_cast<double>(n);
      }
      for (size_t i = 0; i < wholes.size(); i++) layout.scatter(i, wholes[i], gathered, 2);
      for (size_t i = 0; i < wholes.size(); i++) {
        EXPECT_TRUE(at::equal(layout.assemble(i, gathered), wholes[i].mul(2))) << ranks << flat << i;
        for (int64_t r = 0; r < ranks; r++) {  // and each shard has its piece
          const auto place = layout.in_shard(i, r), part = layout.in_parameter(i, r);
          const auto piece = gathered.narrow(0, r * layout.shard_numel() + place.begin, place.size);
          const auto wanted = flat ? wholes[i].view(-1).narrow(0, part.begin, part.size)
                                   : wholes[i].narrow(kSome[i].dim, part.begin, part.size);
          EXPECT_TRUE(at::equal(piece.view(wanted.sizes()), wanted.mul(2)));
        }
      }
    }
}

}  // namespace
}  // namespace tessera::data_parallel::fsdp
