#include "tessera/compile/api/compile.h"
#include "tessera/compile/api/compile_backward.h"
#include "tessera/models/mlp.h"
#include "tessera/nn/module_tree.h"

#include "train_step.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

namespace tessera {
namespace {

using models::MLP;

TEST(CompileModule, ForwardAndBackwardEqualEager) {
  const CompileScope strict({.numerics = Numerics::Strict});  // equal bits
  const MLP start(models::mlp_module());
  auto eager = clone(start), model = clone(start);
  auto compiled = compile(model);
  for (int i = 0; i < 3; i++) {
    auto x = torch::randn({8, 10}, torch::requires_grad()), y = x.detach().clone().requires_grad_();
    const auto wanted = eager(x), found = compiled(y);
    EXPECT_TRUE(at::equal(found, wanted));
    wanted.pow(2).sum().backward();
    found.pow(2).sum().backward();
    expect_equal_bits(*model, *eager);
    EXPECT_TRUE(at::equal(y.grad(), x.grad()));
  }
  EXPECT_EQ(compiled.cache().size(), 1u);
}

TEST(CompileBackward, GradientsEqualEagerAndTheProgramIsReused) {
  const CompileScope strict({.numerics = Numerics::Strict});  // equal bits
  const MLP start(models::mlp_module());
  for (const bool compile_forward : {false, true}) {
    auto eager = clone(start), model = clone(start);
    auto compiled = compile(model);
    for (int i = 0; i < 4; i++) {  // from the second call on, gradients accumulate
      const auto x = torch::randn({8, 10});
      eager(x).pow(2).sum().backward();
      const auto loss = (compile_forward ? compiled(x) : model(x)).pow(2).sum();
      auto scope = compile_backward({.fullgraph = true, .verified = true});
      loss.backward();
      ASSERT_EQ(scope.programs().size(), 1u);
      EXPECT_EQ(scope.programs()[0]->runs(), i < 2 ? 1 : i) << scope.programs()[0]->listing();
      expect_equal_bits(*model, *eager);
    }
  }
  reset_compile_caches();
}

}  // namespace
}  // namespace tessera
