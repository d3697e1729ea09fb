// Errors that other systems made silently, most from public bug reports. Here each case gives the right value or
// throws.
#include "compare_with_plain.h"

#include "tessera/base/error.h"
#include "tessera/dtensor/policy.h"

#include <c10/core/InferenceMode.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

namespace tessera::test {
namespace {

// With every placement, over shards that are uneven and, with four ranks, empty.
template <class F>
void expect_like_plain_everywhere(const at::Tensor& value, F f) {
  std::vector<Placement> placements = {Replicate()};
  for (int64_t d = 0; d < value.dim(); d++) placements.push_back(Shard(d));
  test::expect_like_plain(value, placements, 4, expect_value, f);
}

// A view of a sharded dim communicates. This function redistributes first.
at::Tensor replicated_on(const at::Tensor& x, int64_t dim) {
  if (!is_dtensor(x) || !DTensor(x).placements()[0].is_sharded(dim)) return x;
  return DTensor(x).redistribute({Replicate()});
}

// pytorch#162692: mean of uneven shards was a mean of means, and NaN where a shard was empty.
TEST(Silent, MeanVarNormOfUnevenAndEmptyShards) {
  const auto value = torch::randn({5, 3});
  expect_like_plain_everywhere(value, [](const at::Tensor& x) { return x.mean(); });
  expect_like_plain_everywhere(value, [](const at::Tensor& x) { return x.mean({0}); });
  expect_like_plain_everywhere(value, [](const at::Tensor& x) { return x.var(std::vector<int64_t>{0}, true); });
  expect_like_plain_everywhere(value, [](const at::Tensor& x) { return x.std(); });
  expect_like_plain_everywhere(value, [](const at::Tensor& x) { return x.norm(); });
  expect_like_plain_everywhere(value, [](const at::Tensor& x) { return x.norm(2, {1}); });
}

// Autograd's formula for max creates a plain tensor of zeros.
TEST(Silent, MaxAndItsGradient) {
  const auto value = torch::randn({5, 3});
  expect_like_plain_everywhere(value, [](const at::Tensor& x) { return x.max(); });
  expect_like_plain_everywhere(value, [](const at::Tensor& x) { return std::get<0>(x.max(0)); });
  expect_like_plain_everywhere(value, [](const at::Tensor& x) { return std::get<0>(x.max(1)); });
  expect_like_plain_everywhere(value, [](const at::Tensor& x) { return std::get<0>(x.topk(2, 1)); });
  expect_like_plain_everywhere(value, [](const at::Tensor& x) { return x.amax({0}); });
}

TEST(Silent, SplitsWithOneUsedResult) {
  const auto value = torch::randn({6, 4, 2});
  expect_like_plain_everywhere(value, [](const at::Tensor& x) { return replicated_on(x, 1).split(2, 1)[1]; });
  expect_like_plain_everywhere(value, [](const at::Tensor& x) { return replicated_on(x, 1).chunk(2, 1)[0] * 3; });
  expect_like_plain_everywhere(value, [](const at::Tensor& x) { return replicated_on(x, 1).unbind(1)[2]; });
}

// pytorch#162312: item() of a partial maximum returned the value of this rank.
TEST(Silent, ItemReducesFirst) {
  run_ranks(2, [](Rank& me) {
    const at::Tensor d = distribute_tensor(torch::arange(6.), me.mesh("x=2"), {Shard(0)});
    EXPECT_EQ(d.max().item<float>(), 5);
    EXPECT_EQ(d.sum().item<float>(), 15);
    EXPECT_EQ(d[1].item<float>(), 1);
  });
}

// pytorch#103306: a round trip of (5, 10) over 4 ranks came back as (8, 10).
TEST(Silent, RoundTripsKeepTheShape) {
  run_ranks(4, [](Rank& me) {
    const auto value = torch::arange(50.).view({5, 10});
    const auto d = distribute_tensor(value, me.mesh("x=4"));
    expect_value(d.redistribute({Shard(0)}).redistribute({Shard(1)}).redistribute({Replicate()}), value);
  });
}

// ones_like of a partial tensor is replicated: adding it must add one, not one per rank.
TEST(Silent, LikeFactoriesOfPartial) {
  run_ranks(2, [](Rank& me) {
    const at::Tensor sum = distribute_tensor(torch::ones({4, 3}), me.mesh("x=2"), {Shard(0)}).sum(0);
    expect_value(torch::ones_like(sum), torch::ones({3}));
    expect_value(sum + torch::ones_like(sum), torch::full({3}, 5.));
    expect_value(torch::zeros_like(sum), torch::zeros({3}));
    expect_value(sum * sum, torch::full({3}, 16.));
    expect_value(sum + 1, torch::full({3}, 5.));
  });
}

// The result of a redistribution is cached. A later write must invalidate it.
TEST(Silent, ACachedRedistributionDoesNotGoStale) {
  run_ranks(2, [](Rank& me) {
    const auto mesh = me.mesh("x=2");
    at::Tensor sum = distribute_tensor(torch::ones({4, 3}), mesh, {Shard(0)}).sum(0);
    expect_value(sum.relu(), torch::full({3}, 4.));
    sum.mul_(2);
    expect_value(sum.relu(), torch::full({3}, 8.));
    sum.view({3}).mul_(2);
    expect_value(sum.relu(), torch::full({3}, 16.));
    auto parameter = torch::zeros({3});
    parameter.set_data(sum);  // shares the local tensor
    parameter.mul_(2);
    expect_value(sum.relu(), torch::full({3}, 32.));
    DTensor(sum).to_local().mul_(2);
    expect_value(sum.relu(), torch::full({3}, 64.));
    std::vector<at::Tensor> list{sum};
    at::_foreach_mul_(list, 2);
    expect_value(sum.relu(), torch::full({3}, 128.));
  });
}

// A Scalar is not in the cache key, unless a rule reads it.
TEST(Silent, NormsOfDifferentOrderAreDifferent) {
  run_ranks(2, [](Rank& me) {
    const at::Tensor d = distribute_tensor(torch::arange(4.), me.mesh("x=2"), {Shard(0)});
    for (double p : {1., 2., 3., std::numeric_limits<double>::infinity()})
      expect_value(at::linalg_vector_norm(d, p), at::linalg_vector_norm(torch::arange(4.), p));
  });
}

// Gradients with different placements accumulate correctly.
TEST(Silent, GradientsWithDifferentPlacementsAccumulate) {
  const auto w = torch::randn({6, 6}), x = torch::randn({4, 6});
  run_ranks(2, [&](Rank& me) {
    const auto mesh = me.mesh("x=2");
    auto plain = w.clone().set_requires_grad(true);
    for (const auto& p : {Replicate(), Shard(0), Shard(1)}) {
      at::Tensor d = distribute_tensor(w, mesh, {p}).set_requires_grad(true);
      plain.mutable_grad().reset();
      for (const auto& q : {Shard(0), Replicate(), Shard(1)}) {
        distribute_tensor(x, mesh, {q}).mm(d).sum().backward();
        x.mm(plain).sum().backward();
      }
      expect_value(d.grad(), plain.grad());
    }
  });
}

TEST(Silent, BackwardWithAPlainGradientThrows) {
  run_ranks(2, [](Rank& me) {
    at::Tensor x = distribute_tensor(torch::ones({4}), me.mesh("x=2"), {Shard(0)}).set_requires_grad(true);
    const auto y = DTensor(x * 2).redistribute({Replicate()});
    EXPECT_THROW(y.backward(torch::ones({4})), UsageError);
  });
}

// A missing bound and the bound -1 are different calls.
TEST(Silent, SlicesWithAndWithoutABound) {
  run_ranks(2, [](Rank& me) {
    const auto value = torch::arange(8.).view({4, 2});
    const at::Tensor d = distribute_tensor(value, me.mesh("x=2"), {Shard(1)});
    expect_value(d.slice(0), value.slice(0));
    expect_value(d.slice(0, -1), value.slice(0, -1));
    expect_value(d.slice(0, std::nullopt, -1), value.slice(0, std::nullopt, -1));
    expect_value(d.slice(0), value.slice(0));
  });
}

// A write to a plain tensor that shares memory is not visible to the library.
TEST(Silent, AWriteToTheLocalOfFromLocalIsSeen) {
  run_ranks(2, [](Rank& me) {
    auto local = torch::ones({3});
    const at::Tensor sum = DTensor::from_local(local, me.mesh("x=2"), {Partial()});
    expect_value(sum.relu(), torch::full({3}, 2.));
    if (me.rank == 0) local.add_(1);
    expect_value(sum.relu(), torch::full({3}, 3.));
  });
}

TEST(Silent, PlainTensorsStayPlain) {
  run_ranks(2, [](Rank& me) {
    const auto mesh = me.mesh("x=2");
    const at::Tensor d = distribute_tensor(torch::ones({4}), mesh, {Shard(0)});
    auto mask = torch::ones({4});
    {
      ImplicitReplication scope;
      expect_value(d + mask, torch::full({4}, 2.));
      EXPECT_THROW(mask.add_(d), UsageError);  // a plain tensor cannot become a DTensor
    }
    EXPECT_FALSE(is_dtensor(mask));
    EXPECT_EQ(mask.data_ptr<float>()[0], 1);
    auto total = torch::zeros({});
    for (int i = 0; i < 3; i++) total.add_(DTensor(d.sum()).redistribute({Replicate()}));
    EXPECT_EQ(total.item<float>(), 12);
  });
}

// A dim of local size 1 may have another global size.
TEST(Silent, SqueezeLooksAtGlobalSizes) {
  run_ranks(2, [](Rank& me) {
    const auto replicated = distribute_tensor(torch::arange(6.).view({3, 1, 2}), me.mesh("x=2"));
    at::Tensor d = replicated.redistribute({Shard(0)});
    expect_value(d.squeeze(), torch::arange(6.).view({3, 2}));
    d.squeeze_(0);
    EXPECT_EQ(d.sizes(), at::IntArrayRef({3, 1, 2}));
    d.squeeze_();
    expect_value(d, torch::arange(6.).view({3, 2}));
  });
}

TEST(Silent, ReshapeOfANonDenseTensorInInferenceMode) {
  run_ranks(2, [](Rank& me) {
    const auto value = torch::arange(24.).view({4, 6});
    const at::Tensor d = distribute_tensor(value, me.mesh("x=2"));
    c10::InferenceMode inference;
    expect_value(d.slice(1, 0, 3).reshape({2, 2, 3}), value.slice(1, 0, 3).reshape({2, 2, 3}));
    const at::Tensor sharded = distribute_tensor(value, me.mesh("x=2"), {Shard(1)});
    expect_value(sharded.reshape({3, 8}), value.reshape({3, 8}));
  });
}

}  // namespace
}  // namespace tessera::test
