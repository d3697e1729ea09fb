#include "tessera/numerics/detail/kernels.h"

#include "tessera/base/detail/parallel.h"
#include "tessera/numerics/detail/product_tile.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

namespace {

using tessera::IndexRange;
using namespace tessera::numerics;

at::Tensor full_product(const at::Tensor& a, const at::Tensor& b, size_t kernel = 0) {
  return product_subtrees(a, b, all_terms(a.size(2)), kernel).select(0, 0);
}
at::Tensor full_sum(const at::Tensor& x, int64_t dim) {
  return sum_subtrees(x, dim, all_terms(x.size(dim))).select(0, 0);
}

// Adds what `ranks` ranks compute from their shards.
template <class Subtrees>
at::Tensor over_ranks(int64_t terms, int64_t ranks, Subtrees subtrees_of) {
  std::vector<IndexRange> ranges;
  std::vector<at::Tensor> subtrees;
  const int64_t size = (terms + ranks - 1) / ranks;
  for (int64_t r = 0; r < ranks; r++) {
    const IndexRange owned{std::min(terms, r * size), std::min(terms, (r + 1) * size)};
    for (const auto& range : complete_subtrees(terms, owned)) ranges.push_back(range);
    subtrees.push_back(subtrees_of(owned));
  }
  return add_subtrees(torch::cat(subtrees), terms, ranges);
}

TEST(InvariantProduct, ARowAndAColumnHaveTheSameBitsInEveryPartOfTheProduct) {
  for (const int64_t k : {1, 3, 96, 100, 384, 1000}) {
    const auto a = torch::randn({2, 37, k}), b = torch::randn({2, k, 45});
    const auto full = full_product(a, b);
    for (const int64_t rows : {1, 2, 3, 5, 12, 13})
      for (const int64_t first : {0, 7, 24})
        EXPECT_TRUE(torch::equal(full_product(a.narrow(1, first, rows), b), full.narrow(1, first, rows))) << k;
    for (const int64_t columns : {1, 2, 16, 31, 33})
      for (const int64_t first : {0, 5, 12})
        EXPECT_TRUE(torch::equal(full_product(a, b.narrow(2, first, columns)), full.narrow(2, first, columns))) << k;
    EXPECT_TRUE(torch::equal(full_product(a.narrow(0, 1, 1), b.narrow(0, 1, 1)), full.narrow(0, 1, 1)));
    const auto transposed = full_product(b.transpose(1, 2), a.transpose(1, 2)).transpose(1, 2);
    EXPECT_TRUE(torch::equal(transposed, full));  // strides do not matter, and a fused multiply-add commutes
  }
}

TEST(InvariantProduct, EveryKernelAndNumberOfThreadsGivesTheBitsOfTheScalarDefinition) {
  for (const auto dtype : {torch::kFloat, torch::kDouble}) {
    const auto a = torch::randn({1, 29, 300}, dtype), b = torch::randn({1, 300, 37}, dtype);
    const auto kernels = tile_kernels<float>().size();
    const auto expected = full_product(a, b, kernels - 1);
    const int threads = at::get_num_threads();
    for (const int n : {1, 2, 3}) {
      at::set_num_threads(n);
      const auto parts = tessera::parts_run_by_other_threads();
      for (size_t kernel = 0; kernel < kernels; kernel++)
        EXPECT_TRUE(torch::equal(full_product(a, b, kernel), expected)) << kernel;
      EXPECT_EQ(tessera::parts_run_by_other_threads() > parts, n > 1);
    }
    at::set_num_threads(threads);
  }
}

TEST(InvariantProduct, EveryShardingOfTheSummedDimGivesTheSameBits) {
  for (const int64_t k : {5, 96, 100, 256, 384}) {
    const auto a = torch::randn({1, 9, k}), b = torch::randn({1, k, 20});
    const auto expected = full_product(a, b);
    for (const auto ranks : kRankCounts)
      EXPECT_TRUE(torch::equal(
          over_ranks(
              k, ranks,
              [&](IndexRange owned) {
                const auto length = owned.end - owned.begin;
                return product_subtrees(a.narrow(2, owned.begin, length), b.narrow(1, owned.begin, length), {k, owned});
              }),
          expected))
          << k << " " << ranks;
  }
}

TEST(InvariantSum, EveryShardingAndPartGivesTheSameBits) {
  for (const int64_t n : {1, 7, 24, 96, 100, 1000}) {
    const auto x = torch::randn({3, n, 70});
    const auto expected = full_sum(x, 1);
    EXPECT_TRUE(torch::equal(full_sum(x.transpose(1, 2).contiguous(), 2), expected));  // rows as columns
    EXPECT_TRUE(torch::equal(full_sum(x.narrow(2, 3, 5), 1), expected.narrow(1, 3, 5)));
    EXPECT_TRUE(torch::equal(full_sum(x.narrow(0, 1, 1), 1), expected.narrow(0, 1, 1)));
    for (const auto ranks : kRankCounts)
      EXPECT_TRUE(torch::equal(
          over_ranks(n, ranks,
                     [&](IndexRange owned) {
                       return sum_subtrees(x.narrow(1, owned.begin, owned.end - owned.begin), 1, {n, owned});
                     }),
          expected))
          << n << " " << ranks;
  }
}

TEST(InvariantEmbeddingGradient, EqualsTheDenseSumOnEverySharding) {
  const int64_t tokens = 96, rows = 11;
  const auto grad = torch::randn({tokens, 6}), indices = torch::randint(rows, {tokens});
  const auto expected = embedding_gradient_subtrees(grad, indices, rows, 3, all_terms(tokens)).select(0, 0);
  auto dense = torch::zeros({tokens, rows, 6});  // token t adds to its row, and +0 to the others
  for (int64_t t = 0; t < tokens; t++)
    if (indices[t].item<int64_t>() != 3) dense[t][indices[t].item<int64_t>()] = grad[t];
  EXPECT_TRUE(torch::equal(expected, full_sum(dense, 0)));
  for (const auto ranks : kRankCounts)
    EXPECT_TRUE(torch::equal(over_ranks(tokens, ranks,
                                        [&](IndexRange owned) {
                                          const auto length = owned.end - owned.begin;
                                          return embedding_gradient_subtrees(grad.narrow(0, owned.begin, length),
                                                                             indices.narrow(0, owned.begin, length),
                                                                             rows, 3, {tokens, owned});
                                        }),
                             expected));
}

// The error against float64, beside that of LibTorch's kernels on the same data.
TEST(InvariantKernels, AreAsAccurateAsTheDefault) {
  const auto error = [](const at::Tensor& x, const at::Tensor& exact) {
    return (x.to(torch::kDouble) - exact).pow(2).mean().sqrt().item<double>();
  };
  for (const int64_t k : {96, 384, 1536, 6144, 24576}) {
    const auto a = torch::randn({1, 24, k}), b = torch::randn({1, k, 48});
    const auto exact = torch::bmm(a.to(torch::kDouble), b.to(torch::kDouble));
    const double ours = error(full_product(a, b), exact), theirs = error(torch::bmm(a, b), exact);
    std::printf("product K %6ld   invariant %.3e   default %.3e\n", static_cast<long>(k), ours, theirs);
    EXPECT_LE(ours, theirs) << k;
    const auto x = torch::randn({k, 512});
    const auto exact_sum = x.to(torch::kDouble).sum(0);
    const double our_sum = error(full_sum(x, 0), exact_sum), their_sum = error(x.sum(0), exact_sum);
    std::printf("sum     n %6ld   invariant %.3e   default %.3e\n", static_cast<long>(k), our_sum, their_sum);
    EXPECT_LE(our_sum, their_sum) << k;
  }
}

}  // namespace
