// Typed and boxed kernels make the same key for the same call, so a typed kernel finds the decision of the boxed one.
// Both return the same result.
#include "tessera/dtensor/dtensor.h"
#include "tessera/propagate/detail/decision.h"
#include "tessera/testing/ranks.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <functional>

namespace tessera {
namespace {

TEST(TypedKernel, FindsTheDecisionOfTheBoxedKernel) {
  const auto value = at::rand({4, 4}) + 1;
  testing::run_ranks(2, [&](testing::Rank& me) {
    at::NoGradGuard no_grad;
    const auto mesh = me.mesh("x=2");
    const at::Tensor a = distribute_tensor(value, mesh, {Shard(0)}), replicated = distribute_tensor(value, mesh);
    const at::Tensor cube = distribute_tensor(value.view({2, 2, 4}), mesh, {Shard(0)});
    const at::Tensor square = distribute_tensor(at::ones({2, 4, 4}), mesh, {Shard(0)});
    const at::Tensor row = distribute_tensor(at::ones({1, 4}), mesh);
    const std::vector<at::Tensor> list{a, a * 1}, states{a * 0, a * 0}, more{a * 0, a * 0},
        steps{at::ones({}), at::ones({})};
    struct {
      const char* name;
      std::function<at::Tensor()> call;
    } calls[] = {
        {"add.Tensor", [&] { return at::add(a, a, 2); }},
        {"sub.Tensor", [&] { return at::sub(a, a); }},
        {"mul.Tensor", [&] { return at::mul(a, a); }},
        {"div.Tensor", [&] { return at::div(a, a); }},
        {"relu", [&] { return at::relu(a); }},
        {"gelu", [&] { return at::gelu(a, "tanh"); }},
        {"silu", [&] { return at::silu(a); }},
        {"threshold_backward", [&] { return at::threshold_backward(a, a, 0); }},
        {"add_.Tensor", [&] { return (a * 1).add_(a); }},
        {"mul_.Tensor", [&] { return (a * 1).mul_(a); }},
        {"_to_copy", [&] { return a.to(at::kDouble); }},
        {"mm", [&] { return at::mm(a, replicated); }},
        {"bmm", [&] { return at::bmm(cube, square); }},
        {"addmm", [&] { return at::addmm(row, a, replicated); }},
        {"t", [&] { return a.t(); }},
        {"transpose.int", [&] { return cube.transpose(1, 2); }},
        {"view",
         [&] {
           return a.view({4, 2, 2});
         }},
        {"expand",
         [&] {
           return row.expand({3, 4});
         }},
        {"sum", [&] { return a.sum(); }},
        {"sum.dim_IntList", [&] { return a.sum(1); }},
        {"cat",
         [&] {
           return at::cat({a, a}, 1);
         }},
        {"_foreach_add.List", [&] { return at::_foreach_add(list, list)[1]; }},
        {"_foreach_add_.List",
         [&] {
           at::_foreach_add_(states, states);
           return states[0];
         }},
        {"detach", [&] { return a.detach(); }},
    };
    auto& cache = propagate::decision_cache(*mesh.state());
    for (const auto& c : calls) {
      const at::Tensor first = DTensor(c.call()).full_tensor();
      const auto misses = cache.misses();
      const auto out = c.call();
      EXPECT_EQ(cache.misses(), misses) << c.name;
      EXPECT_TRUE(at::equal(DTensor(out).full_tensor(), first)) << c.name;
    }
    auto step = [&](double lr) {
      at::_fused_adamw_(list, list, states, more, {}, steps, lr, 0.9, 0.999, 0, 1e-8, false, false);
    };
    step(0.1);
    const auto misses = cache.misses();
    step(0.2);
    EXPECT_EQ(cache.misses(), misses);
  });
}

}  // namespace
}  // namespace tessera
