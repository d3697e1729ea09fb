#include "tessera/numerics/detail/kernels.h"

#include "tessera/base/detail/parallel.h"
#include "tessera/numerics/numerics.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <functional>

namespace {

using tessera::IndexRange;
using namespace tessera::numerics;

at::Tensor full_product(const at::Tensor& a, const at::Tensor& b, const CpuKernels& kernels = cpu_kernels()) {
  return product_subtrees(a, b, all_terms(a.size(2)), kernels).select(0, 0);
}
at::Tensor full_sum(const at::Tensor& x, int64_t dim) {
  return sum_subtrees(x, dim, all_terms(x.size(dim))).select(0, 0);
}

// The definition: one std::fma per term, and the steps on a stack. a (M, K), b (K, N).
template <class T>
at::Tensor product_by_definition(const at::Tensor& a, const at::Tensor& b) {
  const auto left = a.accessor<T, 2>(), right = b.accessor<T, 2>();
  const auto result = torch::empty({a.size(0), b.size(1)}, a.options());
  auto out = result.accessor<T, 2>();
  const auto steps = product_steps(all_terms(a.size(1)));
  for (int64_t i = 0; i < a.size(0); i++)
    for (int64_t j = 0; j < b.size(1); j++) {
      std::vector<T> stack;
      for (const auto& step : steps) {
        T sum = 0;
        for (auto k = step.begin; k < step.end; k++) sum = std::fma(left[i][k], right[k][j], sum);
        for (int merge = 0; merge < step.merges; merge++, stack.pop_back()) sum = stack.back() + sum;
        stack.push_back(sum);
      }
      out[i][j] = stack.back();
    }
  return result;
}

// The numbers of ranks that have equal shards of at least kShortestShard terms, or shards of a long sum.
std::vector<int64_t> rank_counts_of(int64_t terms) {
  std::vector<int64_t> counts;
  for (const auto ranks : kRankCounts)
    if (terms >= kLongSum || (terms % ranks == 0 && (ranks == 1 || terms / ranks >= kShortestShard)))
      counts.push_back(ranks);
  return counts;
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

TEST(InvariantProduct, EveryProcessorAndNumberOfThreadsGivesTheBitsOfTheDefinition) {
  // Rows and terms: 3000 terms need several panels of b, and 2100 rows are not packed at once.
  const std::pair<int64_t, int64_t> shapes[] = {{29, 5}, {29, 300}, {29, 768}, {29, 3000}, {2100, 40}};
  for (const auto dtype : {torch::kFloat, torch::kDouble})
    for (const auto& [m, k] : shapes) {
      const auto a = torch::randn({m, k}, dtype), b = torch::randn({k, 131}, dtype);
      const auto expected =
          dtype == torch::kFloat ? product_by_definition<float>(a, b) : product_by_definition<double>(a, b);
      const int threads = at::get_num_threads();
      for (const auto* kernels : all_cpu_kernels().kernels) {
        if (!kernels || std::string(kernels->name) == "baseline") continue;  // which may round products, too
        for (const int n : {1, 2, 3})
          for (const bool transposed : {false, true}) {
            at::set_num_threads(n);
            const auto parts = tessera::parts_run_by_other_threads();
            const auto left = transposed ? a.t().contiguous().t() : a, right = transposed ? b.t().contiguous().t() : b;
            EXPECT_TRUE(torch::equal(full_product(left.unsqueeze(0), right.unsqueeze(0), *kernels)[0], expected))
                << kernels->name << " " << m << " " << k << " " << transposed << " " << n;
            EXPECT_EQ(tessera::parts_run_by_other_threads() > parts, n > 1 && k > 5);  // a small one is not shared
          }
      }
      at::set_num_threads(threads);
    }
}

// Norms and attention have the same bits on processors with vectors of other lengths.
TEST(InvariantKernels, RowsHaveTheSameBitsOnAllProcessors) {
  const int64_t rows = 5, columns = 77;
  const auto x = torch::randn({rows, columns}), dy = torch::randn({rows, columns}), weight = torch::randn({columns}),
             bias = torch::randn({columns});
  const auto head = [](at::Tensor& t) { return StridedMatrix<float>{t.data_ptr<float>(), t.size(1), 1}; };
  const auto read = [](const at::Tensor& t) {
    return StridedMatrix<const float>{t.const_data_ptr<float>(), t.size(1), 1};
  };
  const int64_t length = 150, dim = 24;
  const auto q = torch::randn({length, dim}), k = torch::randn({length, dim}), v = torch::randn({length, dim}),
             dout = torch::randn({length, dim});
  std::vector<at::Tensor> expected;
  for (const auto* kernels : all_cpu_kernels().kernels) {
    if (!kernels || std::string(kernels->name) == "baseline") continue;
    auto y = torch::empty_like(x), mean = torch::empty({rows}), rstd = torch::empty({rows}), dx = torch::empty_like(x),
         products = torch::empty_like(x), gelu = torch::empty_like(x), slope = torch::empty_like(x);
    const auto* in = x.const_data_ptr<float>();
    kernels->layer_norm({columns, in, weight.const_data_ptr<float>(), bias.const_data_ptr<float>(), y.data_ptr<float>(),
                         mean.data_ptr<float>(), rstd.data_ptr<float>(), 1e-5F},
                        0, rows);
    kernels->layer_norm_backward(
        {columns, dy.const_data_ptr<float>(), in, mean.data_ptr<float>(), rstd.data_ptr<float>(),
         weight.const_data_ptr<float>(), dx.data_ptr<float>(), false, products.data_ptr<float>()},
        0, rows, nullptr, nullptr);
    kernels->gelu(in, gelu.data_ptr<float>(), x.numel(), false);
    kernels->gelu_backward(dy.const_data_ptr<float>(), in, slope.data_ptr<float>(), x.numel(), false);
    auto out = torch::empty({length, dim}), logsumexp = torch::empty({length}), dq = torch::empty_like(out),
         dk = torch::empty_like(out), dv = torch::empty_like(out);
    const AttentionHead attention{
        length, length, dim, read(q), read(k), read(v), head(out), logsumexp.data_ptr<float>(), 1, 0.2F, true};
    std::vector<float> scratch(static_cast<size_t>(2 * kernels->queries * (length + kernels->product_columns)));
    kernels->attention(attention, 0, length, scratch.data());
    kernels->attention_backward(attention, {read(dout), head(dq), head(dk), head(dv)}, scratch.data());
    const std::vector<at::Tensor> found = {y, mean, rstd, dx, products, gelu, slope, out, logsumexp, dq, dk, dv};
    if (expected.empty()) expected = found;
    for (size_t i = 0; i < found.size(); i++) EXPECT_TRUE(torch::equal(found[i], expected[i])) << kernels->name << i;
  }
}

TEST(InvariantProduct, EveryShardingOfTheSummedDimGivesTheSameBits) {
  for (const int64_t k : {5, 96, 100, 256, 384, 768, 1700}) {
    const auto a = torch::randn({1, 9, k}), b = torch::randn({1, k, 20});
    const auto expected = full_product(a, b);
    for (const auto ranks : rank_counts_of(k))
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
  for (const int64_t n : {1, 7, 24, 96, 100, 768, 1000, 2000}) {
    const auto x = torch::randn({3, n, 170});
    const auto expected = full_sum(x, 1);
    EXPECT_TRUE(torch::equal(full_sum(x.transpose(1, 2).contiguous(), 2), expected));  // rows as columns
    EXPECT_TRUE(torch::equal(full_sum(x.narrow(2, 3, 5), 1), expected.narrow(1, 3, 5)));
    EXPECT_TRUE(torch::equal(full_sum(x.narrow(0, 1, 1), 1), expected.narrow(0, 1, 1)));
    for (const auto ranks : rank_counts_of(n))
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
  for (const auto ranks : rank_counts_of(tokens))
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
  const auto x = torch::randn({300, 250}) * 2, w = torch::randn({250}), heads = torch::randn({2, 3, 200, 64});
  const std::vector<std::pair<const char*, std::function<at::Tensor(at::ScalarType)>>> ops = {
      {"gelu", [&](at::ScalarType t) { return at::gelu(x.to(t)); }},
      {"gelu, tanh", [&](at::ScalarType t) { return at::gelu(x.to(t), "tanh"); }},
      {"gelu backward", [&](at::ScalarType t) { return at::gelu_backward(x.to(t), x.to(t)); }},
      {"gelu backward, tanh", [&](at::ScalarType t) { return at::gelu_backward(x.to(t), x.to(t), "tanh"); }},
      {"layer norm", [&](at::ScalarType t) { return at::layer_norm(x.to(t), {250}, w.to(t), w.to(t)); }},
      {"attention",
       [&](at::ScalarType t) {
         return at::scaled_dot_product_attention(heads.to(t), heads.to(t) * 0.9, heads.to(t) * 1.1, {}, 0, true);
       }},
  };
  for (const auto& [name, op] : ops) {
    const auto exact = op(at::kDouble), default_result = op(at::kFloat);
    const tessera::NumericsScope scope(tessera::Numerics::Invariant);
    const double ours = error(op(at::kFloat), exact), theirs = error(default_result, exact);
    std::printf("%-19s  invariant %.3e   default %.3e\n", name, ours, theirs);
    EXPECT_LE(ours, theirs) << name;
  }
}

}  // namespace
