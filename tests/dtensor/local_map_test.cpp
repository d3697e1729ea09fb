// local_map: a function on local tensors becomes a function on DTensors.
#include "tessera/dtensor/local_map.h"

#include "tessera/base/error.h"
#include "tessera/testing/expect_error.h"
#include "tessera/testing/ranks.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

namespace tessera {
namespace {

using testing::error_message;
using testing::Rank;
using testing::run_ranks;

const Placements R{Replicate()}, S0{Shard(0)}, S1{Shard(1)}, P{Partial()};

DTensor distribute(const at::Tensor& t, const DeviceMesh& mesh, const Placements& placements) {
  return distribute_tensor(t, mesh, placements, {.src_data_rank = std::nullopt});
}

TEST(LocalMap, RunsOnLocalTensors) {
  for (int n : {1, 2, 4})
    run_ranks(n, [&](Rank& me) {
      const auto mesh = me.mesh({n}, {"tp"});
      const auto a = torch::arange(96.).view({8, 12}), b = torch::arange(48.).view({12, 4});
      const auto mm =
          local_map([](const at::Tensor& x, const at::Tensor& y) { return torch::mm(x, y); }, {P}, {S1, S0});
      const DTensor y = mm(distribute(a, mesh, S1), distribute(b, mesh, S0));
      EXPECT_EQ(y.placements(), PlacementsRef(P));
      EXPECT_EQ(y.sizes(), (at::IntArrayRef{8, 4}));
      EXPECT_TRUE(torch::allclose(y.full_tensor(), torch::mm(a, b)));
      const DTensor twice = local_map([](const at::Tensor& x, double by) { return x * by; }, {S0}, {S0, std::nullopt})(
          distribute(a, mesh, S0), 2.0);
      EXPECT_TRUE(torch::equal(twice.to_local(), distribute(a, mesh, S0).to_local() * 2));
      EXPECT_EQ(twice.sizes(), a.sizes());
    });
}

TEST(LocalMap, IsDifferentiable) {
  const auto a = torch::rand({8, 12}), b = torch::rand({12, 4});
  for (int n : {1, 2, 3})  // 12 columns over 3 ranks are even, 8 rows are not
    run_ranks(n, [&](Rank& me) {
      const auto mesh = me.mesh({n}, {"dp"});
      auto x = distribute(a, mesh, S0);
      auto w = distribute(b, mesh, R);
      x.requires_grad_();
      w.requires_grad_();
      // Each rank computes the gradient of w from its own rows only, so it is Partial.
      const auto mm = local_map([](const at::Tensor& p, const at::Tensor& q) { return torch::mm(p, q); }, {S0}, {S0, R},
                                {.in_grad_placements = {std::nullopt, P}});
      const DTensor y = mm(x, w);
      y.pow(2).sum().backward();
      auto x2 = a.clone().requires_grad_(), w2 = b.clone().requires_grad_();
      torch::mm(x2, w2).pow(2).sum().backward();
      EXPECT_TRUE(torch::allclose(y.full_tensor(), torch::mm(a, b)));
      EXPECT_TRUE(torch::allclose(DTensor(x.grad()).full_tensor(), x2.grad()));
      EXPECT_TRUE(torch::allclose(DTensor(w.grad()).full_tensor(), w2.grad()));
    });
}

TEST(LocalMap, UnevenShardsGiveTheRightGlobalSize) {
  for (int n : {2, 3, 4})
    for (int64_t rows : {1, 2, 5, 7, 10})
      run_ranks(n, [&](Rank& me) {
        const auto mesh = me.mesh({n}, {"dp"});
        const auto a = torch::arange(rows * 6.).view({rows, 6});
        const DTensor y =
            local_map([](const at::Tensor& x) { return x.narrow(1, 0, 3) + 1; }, {S0}, {S0})(distribute(a, mesh, S0));
        EXPECT_EQ(y.sizes(), (at::IntArrayRef{rows, 3}));
        EXPECT_TRUE(torch::equal(y.full_tensor(), a.narrow(1, 0, 3) + 1));
        // Every index becomes a block of two: 7 rows over 3 ranks are 3 3 1, and the result has 6 6 2.
        const auto repeated =
            local_map([](const at::Tensor& x) { return x.repeat_interleave(2, 0); }, {Placements{Shard(0, 2)}}, {S0});
        EXPECT_TRUE(torch::equal(DTensor(repeated(distribute(a, mesh, S0))).full_tensor(), a.repeat_interleave(2, 0)));
      });
}

TEST(LocalMap, NestedAndSeveralResults) {
  run_ranks(4, [](Rank& me) {
    const auto mesh = me.mesh("dp=2,tp=2");
    const auto a = torch::arange(7 * 5.).view({7, 5});
    const Placements nested{Shard(0), Shard(0)}, grid{Shard(0), Shard(1)}, rows{Shard(0), Replicate()};
    const auto both = [](const at::Tensor& x, const at::Tensor& y) { return std::make_tuple(x * 2, y.t(), x.sum()); };
    const Placements sums{Partial(), Partial()}, flipped{Shard(1), Shard(0)};
    auto [p, q, r] = local_map(both, {nested, flipped, sums}, {nested, grid})(distribute(a, mesh, nested),
                                                                              distribute(a, mesh, grid));
    EXPECT_TRUE(torch::equal(DTensor(p).full_tensor(), a * 2));
    EXPECT_TRUE(torch::equal(DTensor(q).full_tensor(), a.t()));
    EXPECT_EQ(DTensor(r).full_tensor().item<float>(), a.sum().item<float>());

    const auto split = [](const at::Tensor& x) { return std::vector<at::Tensor>{x + 1, x + 2}; };
    const auto parts = local_map(split, {rows, std::nullopt}, {rows})(distribute(a, mesh, rows));
    EXPECT_TRUE(torch::equal(DTensor(parts[0]).full_tensor(), a + 1));
    EXPECT_FALSE(is_dtensor(parts[1]));
  });
}

TEST(LocalMap, RedistributesInputsWithTheOption) {
  run_ranks(2, [](Rank& me) {
    const auto mesh = me.mesh("tp=2");
    const auto a = torch::arange(24.).view({4, 6});
    const auto softmax = [](const at::Tensor& x) { return torch::softmax(x, 1); };
    const DTensor y = local_map(softmax, {S0}, {S0}, {.redistribute_inputs = true})(distribute(a, mesh, S1));
    EXPECT_TRUE(torch::allclose(y.full_tensor(), torch::softmax(a, 1)));
    const auto text = error_message<UsageError>([&] { local_map(softmax, {S0}, {S0})(distribute(a, mesh, S1)); });
    EXPECT_CONTAINS(text, "argument 0 is f32[4, 6][S(1)]");
    EXPECT_CONTAINS(text, "in_placements has [S(0)]");
    EXPECT_CONTAINS(text, ".redistribute_inputs = true");
  });
}

TEST(LocalMap, PlainArgumentsGivePlainResults) {
  run_ranks(2, [](Rank&) {
    const auto y = local_map([](const at::Tensor& x) { return x + 1; }, {S0})(torch::ones({3}));
    EXPECT_FALSE(is_dtensor(y));
    EXPECT_TRUE(torch::equal(y, torch::full({3}, 2.f)));
  });
}

TEST(LocalMap, ErrorsNameTheArgumentAndTheFix) {
  run_ranks(2, [](Rank& me) {
    const auto mesh = me.mesh("tp=2");
    const auto x = distribute(torch::ones({4, 6}), mesh, S0), uneven = distribute(torch::ones({3, 6}), mesh, S0);
    const auto same = [](const at::Tensor& t) { return t; };
    const auto add = [](const at::Tensor& t, const at::Tensor& u) { return t + u; };
    EXPECT_CONTAINS(error_message<UsageError>([&] {
                      local_map(same, {S0}, {S0, S0})(x);
                    }),
                    "in_placements has 2 entries, the call 1 arguments");
    EXPECT_CONTAINS(error_message<UsageError>([&] {
                      local_map(same, {S0, S0}, {S0})(x);
                    }),
                    "gave 1 tensors, out_placements has 2");
    EXPECT_CONTAINS(error_message<UsageError>([&] {
                      local_map(same, {S0}, {S0})(torch::ones({4, 6}));
                    }),
                    "which is a plain tensor");
    EXPECT_CONTAINS(error_message<UsageError>([&] {
                      local_map(add, {S0}, {S0, std::nullopt})(x, x);
                    }),
                    "argument 1 is");
    EXPECT_CONTAINS(error_message<UsageError>([&] {
                      local_map(same, {Placements{Shard(0), Shard(0)}}, {S0})(x);
                    }),
                    "has 1 axes");
    EXPECT_CONTAINS(error_message<UsageError>([&] {
                      local_map(same, {S0}, {S0}, {.in_grad_placements = {R, R}})(x);
                    }),
                    "in_grad_placements has 2");
    EXPECT_CONTAINS(error_message<UsageError>([&] { local_map(same, {Placements{Shard(2)}}, {S0})(x); }), "2");
    // 3 rows over 2 ranks are 2 and 1. Repeated they are 4 and 2, but Shard(0) of 6 rows is 3 and 3.
    const auto text = error_message<UsageError>([&] {
      local_map([](const at::Tensor& t) { return t.repeat({2, 1}); }, {S0}, {S0})(uneven);
    });
    EXPECT_CONTAINS(text, "should have local sizes [3, 6]");
    EXPECT_CONTAINS(text, "the function returned [4, 6]");
    EXPECT_CONTAINS(text, "Shard(dim, block)");
  });
}

}  // namespace
}  // namespace tessera
