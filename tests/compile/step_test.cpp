#include "tessera/compile/compile.h"

#include "tessera/models/gpt2.h"
#include "tessera/models/loss.h"
#include "tessera/models/mlp.h"
#include "tessera/nn/module_tree.h"
#include "tessera/optim/adam.h"
#include "tessera/optim/sgd.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

namespace tessera {
namespace {

using models::MLP;

const auto kStep = [](auto& model, auto& opt, const at::Tensor& x) {
  opt.zero_grad();
  auto loss = model(x).pow(2).mean();
  loss.backward();
  opt.step();
  return loss;
};

template <class A, class B>
void expect_equal_bits(const A& found, const B& wanted) {
  const auto a = found->parameters(), b = wanted->parameters();
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); i++) {
    EXPECT_TRUE(at::equal(a[i], b[i])) << i;
    ASSERT_EQ(a[i].grad().defined(), b[i].grad().defined()) << i;
    if (a[i].grad().defined()) {
      EXPECT_TRUE(at::equal(a[i].grad(), b[i].grad())) << i;
    }
  }
}

TEST(Compile, AStepIsTheEagerStep) {
  const MLP start(models::mlp_module());
  for (const bool warm : {true, false}) {
    auto eager = clone(start), model = clone(start);
    optim::AdamW eager_opt(eager->parameters(), {.lr = 0.01, .fused = true}),
        opt(model->parameters(), {.lr = 0.01, .fused = true});
    auto step = compile(kStep);
    const auto x = torch::randn({8, 10});
    if (warm) {
      kStep(eager, eager_opt, x);
      kStep(model, opt, x);
    }
    for (int i = 0; i < 4; i++) {
      const auto y = torch::randn({8, 10});
      const auto wanted = kStep(eager, eager_opt, y);
      const auto found = step(model, opt, y);
      EXPECT_TRUE(at::equal(found, wanted)) << i;
      EXPECT_FALSE(found.requires_grad());
      expect_equal_bits(model, eager);
    }
    EXPECT_EQ(step.cache().size(), warm ? 1 : 2);
  }
}

}  // namespace
}  // namespace tessera
