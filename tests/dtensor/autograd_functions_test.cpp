// from_local, to_local and redistribute: the placements of each gradient (the table in autograd_functions.h) and its
// value.
#include "tessera/dtensor/detail/autograd_functions.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/testing/ranks.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

namespace tessera {
namespace {

using testing::Rank;
using testing::run_ranks;

TEST(AutogradFunctions, GradientPlacements) {
  const auto R = Replicate(), S0 = Shard(0), S1 = Shard(1), P = Partial();
  struct {
    Placement value, gradient, expected;
  } cases[] = {{S0, R, S0}, {S0, P, S0}, {R, S0, R}, {P, R, R}, {P, S0, R}, {S0, S1, S0}, {R, P, P}, {P, P, P}};
  for (const auto& c : cases)
    EXPECT_EQ(detail::gradient_placements({c.value}, {c.gradient})[0], c.expected)
        << c.value << " with gradient " << c.gradient;
}

TEST(AutogradFunctions, RedistributeHasTheGradientOfTheIdentity) {
  const auto value = torch::randn({5, 4}), weights = torch::arange(20.).view({5, 4});
  for (int n : {1, 2, 3})
    run_ranks(n, [&](Rank&) {
      const auto mesh = init_device_mesh("cpu", {n}, {"x"});
      for (const auto& from : {Replicate(), Shard(0), Shard(1)})
        for (const auto& to : {Replicate(), Shard(0), Shard(1)}) {
          auto x = distribute_tensor(value, mesh, {from}).set_requires_grad(true);
          const auto redistributed = DTensor(x).redistribute({to});
          EXPECT_EQ(redistributed.placements()[0], to);
          (redistributed * distribute_tensor(weights, mesh, {to})).sum().backward();
          EXPECT_EQ(DTensor(x.grad()).placements()[0], from);
          EXPECT_TRUE(torch::allclose(DTensor(x.grad()).full_tensor(), weights)) << from << " to " << to;
        }
    });
}

TEST(AutogradFunctions, FromLocalAndToLocalHaveGradients) {
  run_ranks(2, [](Rank& me) {
    const auto mesh = me.mesh("x=2");
    // from_local(R) next to a sharded tensor: the gradient is gathered.
    auto plain = torch::ones({4}).set_requires_grad(true);
    const auto weights = torch::arange(4.);
    (DTensor::from_local(plain, mesh, {Replicate()}) * distribute_tensor(weights, mesh, {Shard(0)})).sum().backward();
    EXPECT_TRUE(torch::equal(plain.grad(), weights));
    // to_local: the local gradient gets the placements of the tensor.
    auto d = distribute_tensor(weights, mesh, {Shard(0)}).set_requires_grad(true);
    (DTensor(d).to_local() * 3).sum().backward();
    EXPECT_EQ(DTensor(d.grad()).placements()[0], Shard(0));
    EXPECT_TRUE(torch::equal(DTensor(d.grad()).full_tensor(), torch::full({4}, 3.)));
    // grad_placements = Partial: the gradients of the ranks add up.
    auto r = distribute_tensor(weights, mesh, {Replicate()}).set_requires_grad(true);
    (DTensor(r).to_local({Partial()}) * (1. + me.rank)).sum().backward();
    EXPECT_TRUE(torch::equal(DTensor(r.grad()).full_tensor(), torch::full({4}, 3.)));
    auto f = distribute_tensor(weights, mesh, {Shard(0)}).set_requires_grad(true);
    (DTensor(f).full_tensor() * weights).sum().backward();
    EXPECT_TRUE(torch::equal(DTensor(f.grad()).full_tensor(), weights));
  });
}

TEST(AutogradFunctions, DoubleBackward) {
  const auto value = torch::randn({4, 3});
  run_ranks(2, [&](Rank& me) {
    const auto mesh = me.mesh("x=2");
    auto x = distribute_tensor(value, mesh, {Shard(0)}).set_requires_grad(true);
    const auto y = DTensor(x * x).redistribute({Replicate()}) * x;
    const auto g = torch::autograd::grad({y.sum()}, {x}, {}, true, true)[0];
    g.sum().backward();
    EXPECT_TRUE(torch::allclose(DTensor(x.grad()).full_tensor(), 6 * value, 1e-5, 1e-6));
  });
}

}  // namespace
}  // namespace tessera
