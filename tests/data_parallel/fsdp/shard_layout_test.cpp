#include "tessera/data_parallel/fsdp/detail/engine/shard_layout.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

namespace tessera::data_parallel::fsdp {
namespace {

const std::vector<ParamShape> kSome{{{5, 3}, 0}, {{4}, 0}, {{2, 3, 2}, 1}, {{1}, 0}};

TEST(ShardLayout, FlatLayoutHasShardsOfEqualLength) {
  const auto layout = ShardLayout::flat(kSome, 3);  // 15 + 4 + 12 + 1 = 32
  EXPECT_EQ(layout.shard_numel(), 11);
  EXPECT_EQ(layout.range_in_shard(0, 0), (ShardRange{0, 11}));
  EXPECT_EQ(layout.range_in_shard(0, 1), (ShardRange{0, 4}));
  EXPECT_EQ(layout.range_in_shard(0, 2), (ShardRange{0, 0}));
  EXPECT_EQ(layout.range_in_shard(1, 1), (ShardRange{4, 4}));
  EXPECT_EQ(layout.range_in_shard(2, 1), (ShardRange{8, 3}));
  EXPECT_EQ(layout.range_in_param(2, 2), (ShardRange{3, 9}));
  EXPECT_EQ(layout.range_in_shard(3, 2), (ShardRange{9, 1}));
}

TEST(ShardLayout, FlatLayoutAlignsParameters) {
  const auto layout = ShardLayout::flat(kSome, 2, 4);  // 16 + 4 + 12 + 1 = 33
  EXPECT_EQ(layout.shard_numel(), 17);
  EXPECT_EQ(layout.range_in_shard(1, 0), (ShardRange{16, 1}));
  EXPECT_EQ(layout.range_in_shard(1, 1), (ShardRange{0, 3}));
}

TEST(ShardLayout, PerParameterLayoutShardsEachParameter) {
  const auto layout = ShardLayout::per_parameter(kSome, 3);
  EXPECT_EQ(layout.shard_numel(), 2 * 3 + 2 + 2 * 1 * 2 + 1);
  EXPECT_EQ(layout.param_shard_sizes(0, 2), (std::vector<int64_t>{1, 3}));
  EXPECT_EQ(layout.param_shard_sizes(1, 2), (std::vector<int64_t>{0}));
  EXPECT_EQ(layout.param_shard_sizes(2, 1), (std::vector<int64_t>{2, 1, 2}));
  EXPECT_EQ(layout.range_in_shard(3, 1), (ShardRange{12, 0}));
}

// What the collective does with runs, for one rank after the other.
at::Tensor read(const comm::Segments& runs, int64_t rank, const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> parts;
  for (const auto& run : runs[static_cast<size_t>(rank)])
    parts.push_back(run.tensor == comm::kPaddingSegment
                        ? at::zeros({run.size})
                        : tensors[static_cast<size_t>(run.tensor)].view(-1).narrow(0, run.begin, run.size));
  return at::cat(parts);
}
void write(const comm::Segments& runs, int64_t rank, const at::Tensor& shard, const std::vector<at::Tensor>& tensors) {
  int64_t at = 0;
  for (const auto& run : runs[static_cast<size_t>(rank)]) {
    if (run.tensor != comm::kPaddingSegment)
      tensors[static_cast<size_t>(run.tensor)].narrow(0, run.begin, run.size).copy_(shard.narrow(0, at, run.size));
    at += run.size;
  }
}

TEST(ShardLayout, AllGatherInvertsReduceScatter) {
  for (const int64_t ranks : {1, 2, 3, 4})
    for (const bool flat : {true, false}) {
      const auto layout = flat ? ShardLayout::flat(kSome, ranks, 4) : ShardLayout::per_parameter(kSome, ranks);
      std::vector<at::Tensor> unsharded, ordered;
      double next = 1;
      for (size_t i = 0; i < kSome.size(); i++) {
        int64_t n = 1;
        for (const int64_t size : kSome[i].sizes) n *= size;
        unsharded.push_back(at::arange(next, next + static_cast<double>(n), at::kFloat).view(kSome[i].sizes));
        ordered.push_back(layout.in_shard_order(i, unsharded.back()));
        next += static_cast<double>(n);
      }
      EXPECT_TRUE(ordered[0].is_same(unsharded[0]));  // no copy if sharded along the first dim
      const auto reduce = layout.gradient_segments({1, 1, 1, 1});
      const std::vector<at::Tensor> gathered{at::full({layout.gathered_numel()}, -1.0),
                                             at::full({layout.staging_numel()}, -1.0)};
      for (int64_t r = 0; r < ranks; r++) {
        const auto shard = read(reduce, r, ordered);
        ASSERT_EQ(shard.numel(), layout.shard_numel());
        for (size_t i = 0; i < unsharded.size(); i++) {
          const auto place = layout.range_in_shard(i, r), part = layout.range_in_param(i, r);
          const auto wanted = flat ? unsharded[i].view(-1).narrow(0, part.begin, part.size)
                                   : unsharded[i].narrow(kSome[i].dim, part.begin, part.size);
          EXPECT_TRUE(at::equal(shard.narrow(0, place.begin, place.size).view(wanted.sizes()), wanted));
        }
        write(layout.gather_segments(), r, shard, gathered);
      }
      layout.copy_from_staging(gathered[1], gathered[0]);
      for (size_t i = 0; i < unsharded.size(); i++)
        EXPECT_TRUE(at::equal(layout.unsharded_param(i, gathered[0]), unsharded[i])) << ranks << flat << i;
    }
}

TEST(ShardLayout, GradientsThatAreNotReadyAreZeros) {
  const auto layout = ShardLayout::per_parameter(kSome, 2);
  const auto segments = layout.gradient_segments({0, 1, 0, 1});
  using OfRank = std::vector<comm::BufferSegment>;
  constexpr auto kPad = comm::kPaddingSegment;
  EXPECT_EQ(segments[0], (OfRank{{kPad, 0, 9}, {1, 0, 2}, {kPad, 0, 8}, {3, 0, 1}}));
  EXPECT_EQ(segments[1], (OfRank{{kPad, 0, 9}, {1, 2, 2}, {kPad, 0, 9}}));
}

}  // namespace
}  // namespace tessera::data_parallel::fsdp
