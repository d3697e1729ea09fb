// Views, in-place ops, in-place ops on views, and tensor lists behave as on plain tensors.
#include "compare_with_plain.h"

#include "tessera/base/error.h"
#include "tessera/dtensor/policy.h"
#include "tessera/testing/expect_error.h"

#include <ATen/autocast_mode.h>
#include <c10/core/InferenceMode.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

namespace tessera::test {
namespace {

template <class F>
void expect_view_like_plain(const at::Tensor& value, const std::vector<Placement>& placements, F f) {
  test::expect_like_plain(value, placements, 3, expect_value_and_strides, f);
}

const auto kAllPlacements = std::vector<Placement>{Replicate(), Shard(0), Shard(1)};

TEST(View, Transposes) {
  const auto value = torch::randn({5, 4});
  expect_view_like_plain(value, kAllPlacements, [](const at::Tensor& x) { return x.t() * 2; });
  expect_view_like_plain(value, kAllPlacements, [](const at::Tensor& x) { return x.t().relu().t(); });
  expect_view_like_plain(value, kAllPlacements, [](const at::Tensor& x) {
    return x.unsqueeze(1).permute({2, 1, 0}).squeeze(1);
  });
}

TEST(View, FlattensAndSplitsShardedDims) {
  const auto value = torch::randn({4, 5, 6});
  const std::vector<Placement> all = {Replicate(), Shard(0), Shard(1), Shard(2)};
  expect_view_like_plain(value, all, [](const at::Tensor& x) { return x.view({20, 6}).view({4, 5, 6}); });
  expect_view_like_plain(value, {Replicate(), Shard(0), Shard(1)}, [](const at::Tensor& x) {
    return x.view({20, 6}).relu();
  });
  expect_view_like_plain(value, {Replicate(), Shard(0), Shard(1), Shard(2)},
                         [](const at::Tensor& x) { return x.reshape({-1}); });
}

// resize_ to as many elements changes the geometry of the tensor. Others that share its memory stay as they are.
TEST(View, ResizeKeepsTheElements) {
  const auto value = torch::randn({4, 5, 6});
  run_ranks(3, [&](Rank& me) {
    for (const auto& p : {Replicate(), Shard(0), Shard(1), Shard(2)}) {
      SCOPED_TRACE(to_string(p));
      at::Tensor d = distribute_tensor(value, me.mesh("x=3"), {p});
      const auto alias = d.alias();
      EXPECT_EQ(d.resize_({20, 6}).sizes(), (std::vector<int64_t>{20, 6}));
      d.mul_(2);
      expect_value_and_strides(d, value.mul(2).view({20, 6}));
      expect_value_and_strides(alias, value.mul(2));
      expect_value_and_strides(d.clone().resize_as_(alias), value.mul(2));
    }
    at::Tensor d = distribute_tensor(value, me.mesh("x=3"), {Shard(0)});
    EXPECT_ERROR(UsageError, d.resize_({4, 5}), "[4, 5, 6]", "[4, 5]", "number of elements");
    EXPECT_ERROR(UsageError, d.transpose(0, 1).resize_({20, 6}), "memory order", "contiguous()");
    EXPECT_EQ(d.sizes(), value.sizes());
  });
  run_ranks(4, [&](Rank& me) {  // sizes [5, 24] cannot keep [S(0), S(1)]
    at::Tensor d = distribute_tensor(value, me.mesh("x=2,y=2"), {Shard(0), Shard(1)});
    {
      const auto alias = d.alias();
      EXPECT_ERROR(ShardingError, d.resize_({5, 24}), "in-place view", "redistribute");
    }
    expect_value_and_strides(d.resize_({5, 24}), value.view({5, 24}));
  });
}

// [B, S, D] @ [D, N] folds B and S; either may be sharded.
TEST(View, LinearWithAShardedSequence) {
  const auto value = torch::randn({2, 5, 6}), weight = torch::randn({3, 6}), bias = torch::randn({3});
  expect_view_like_plain(value, {Replicate(), Shard(0), Shard(1)}, [&](const at::Tensor& x) {
    auto like = [&](const at::Tensor& t) -> at::Tensor {
      return is_dtensor(x) ? at::Tensor(distribute_tensor(t, DTensor(x).device_mesh())) : t;
    };
    return torch::nn::functional::linear(x, like(weight), like(bias));
  });
}

// A view that cannot keep the sharding redistributes its base. CommPolicy can forbid it.
TEST(View, CommunicatesWhereItCannotKeepTheSharding) {
  run_ranks(4, [](Rank& me) {
    // pytorch#179502: view(16, 6) of [12, 8] S(1) over 4 ranks returned S(0) without communication.
    const auto d = distribute_tensor(torch::arange(96.).view({12, 8}), me.mesh("x=4"), {Shard(1)});
    expect_value_and_strides(d.view({16, 6}), torch::arange(96.).view({16, 6}));
    expect_value_and_strides(d.reshape({16, 6}), torch::arange(96.).view({16, 6}));
    const CommPolicyScope strict(CommPolicy::Error);
    EXPECT_THROW(d.view({16, 6}), ShardingError);
  });
}

TEST(View, ExpandSumsItsGradient) {
  const auto value = torch::randn({6});
  expect_view_like_plain(value, {Replicate(), Shard(0)}, [](const at::Tensor& x) { return x.expand({4, 6}) * 3; });
}

TEST(Inplace, ThroughViewsOfViews) {
  const auto value = torch::randn({6, 4});
  expect_view_like_plain(value, kAllPlacements, [](const at::Tensor& x) {
    auto y = x * 1;
    y.t().mul_(2);
    y.view({6, 2, 2}).add_(1);
    return y;
  });
  expect_view_like_plain(value, {Replicate(), Shard(1)}, [](const at::Tensor& x) {
    auto y = x * 1;
    y.slice(0, 1, 3).zero_();
    return y;
  });
}

// pytorch#139735: a write through a slice of the sharded dim was silently lost.
// The slice communicates, and the write goes back to its base. Its gradient too.
TEST(Inplace, ThroughASliceOfAShardedDimIsWrittenBack) {
  const auto value = torch::randn({6, 4});
  expect_view_like_plain(value, kAllPlacements, [](const at::Tensor& x) {
    auto y = x * 1;
    y.slice(0, 1, 3).mul_(3);
    y.select(1, 2).add_(y.select(1, 0));
    return y;
  });
}

TEST(Inplace, KeepsThePlacementOfTheWrittenTensor) {
  const auto value = torch::randn({4, 6});
  run_ranks(2, [&](Rank& me) {
    const auto mesh = me.mesh("x=2");
    auto sum = DTensor(distribute_tensor(value, mesh, {Shard(0)}).sum(0));  // P(sum)
    ASSERT_TRUE(sum.placements()[0].is_partial());
    at::Tensor(sum).add_(distribute_tensor(torch::ones({6}), mesh));  // R is converted to P(sum)
    EXPECT_TRUE(sum.placements()[0].is_partial());
    EXPECT_TRUE(torch::allclose(sum.full_tensor(), value.sum(0) + 1, 1e-5, 1e-6));
    at::Tensor(sum).add_(1);  // no strategy keeps P(sum): the functional form runs, and its result is copied
    EXPECT_TRUE(sum.placements()[0].is_partial());
    at::Tensor(sum).relu_();
    EXPECT_TRUE(torch::allclose(sum.full_tensor(), (value.sum(0) + 2).relu(), 1e-5, 1e-6));
    auto sharded = distribute_tensor(value, mesh, {Shard(0)});
    at::Tensor(sharded).add_(distribute_tensor(value, mesh, {Shard(1)}));
    EXPECT_EQ(sharded.placements()[0], Shard(0));
    EXPECT_TRUE(torch::equal(sharded.full_tensor(), value + value));
  });
}

TEST(Inplace, ChangesOfGeometry) {
  const auto value = torch::randn({4, 6});
  run_ranks(2, [&](Rank& me) {
    at::Tensor d = distribute_tensor(value, me.mesh("x=2"), {Shard(0)});
    const auto before = d.detach();
    d.t_();
    expect_value_and_strides(d, value.t());
    EXPECT_EQ(DTensor(d).placements()[0], Shard(1));
    expect_value_and_strides(before, value);  // it shares the memory, but not the geometry
  });
}

TEST(Inplace, AutogradSeesVersionCounters) {
  run_ranks(2, [](Rank& me) {
    auto x = distribute_tensor(torch::ones({4}), me.mesh("x=2"), {Shard(0)}).set_requires_grad(true);
    auto y = x * 1;
    auto z = y * y;
    y.add_(1);
    EXPECT_THROW(z.sum().backward(), c10::Error);
    std::vector<at::Tensor> list{x.detach() * 1};
    const auto version = list[0]._version();
    at::_foreach_add_(list, list);
    EXPECT_GT(list[0]._version(), version);
  });
}

TEST(Lists, CatStackSplitForeach) {
  const auto a = torch::randn({5, 4}), b = torch::randn({5, 4});
  run_ranks(3, [&](Rank& me) {
    const auto mesh = me.mesh("x=3");
    const at::Tensor da = distribute_tensor(a, mesh, {Shard(0)}), db = distribute_tensor(b, mesh, {Replicate()});
    expect_value_and_strides(at::cat({da, db}, 1), at::cat({a, b}, 1));
    expect_value_and_strides(at::cat({da, db}, 0), at::cat({a, b}, 0));
    expect_value_and_strides(at::stack({da, db}, 1), at::stack({a, b}, 1));
    const auto parts = da.split(3, 1);
    ASSERT_EQ(parts.size(), 2u);
    expect_value_and_strides(parts[1], a.split(3, 1)[1]);
    const auto sums = at::_foreach_add({da, db}, {db, da});
    expect_value_and_strides(sums[0], a + b);
    expect_value_and_strides(sums[1], a + b);
    expect_value_and_strides(da.chunk(2, 1)[0], a.chunk(2, 1)[0]);
    expect_value_and_strides(da.unbind(1)[2], a.unbind(1)[2]);
  });
}

TEST(Modes, InferenceNoGradAutocast) {
  const auto w = torch::randn({6, 6}), v = torch::randn({4, 6});
  run_ranks(2, [&](Rank& me) {
    const auto mesh = me.mesh("x=2");
    at::Tensor dw = distribute_tensor(w, mesh, {Shard(1)}).set_requires_grad(true);
    const at::Tensor dv = distribute_tensor(v, mesh);
    {
      c10::InferenceMode inference;
      expect_value_and_strides(dv.mm(dw.t().t()), v.mm(w));
      const at::Tensor inside = distribute_tensor(v, mesh, {Shard(0)});
      expect_value_and_strides(inside.view({2, 2, 6}).relu(), v.view({2, 2, 6}).relu());
    }
    {
      torch::NoGradGuard no_grad;
      EXPECT_FALSE(dv.mm(dw).requires_grad());
    }
    at::autocast::set_autocast_enabled(at::kCPU, true);
    const auto low = dv.mm(dw);
    at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(at::kCPU, false);
    EXPECT_EQ(low.dtype(), torch::kBFloat16);
    EXPECT_TRUE(torch::allclose(DTensor(low.detach()).full_tensor().to(torch::kFloat), v.mm(w), 0.1, 0.1));
  });
}

}  // namespace
}  // namespace tessera::test
