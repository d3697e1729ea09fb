#pragma once
#include "tessera/dtensor/detail/meta.h"
#include "tessera/models/mlp.h"
#include "tessera/optim/sgd.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>

namespace tessera {

// One training step: zero_grad, forward, backward, optimizer step. Returns the loss.
inline const auto train_step = [](auto& model, auto& opt, const at::Tensor& x) {
  opt.zero_grad();
  auto loss = model(x).pow(2).mean();
  loss.backward();
  opt.step();
  return loss;
};

// SGD for steps that capture it: the lambda of a step is copied.
inline std::shared_ptr<optim::SGD> shared_sgd(const models::MLP& model) {
  return std::make_shared<optim::SGD>(model->parameters(), optim::SGD::Options{.lr = 0.1});
}

// Parameters and gradients are bitwise equal. Of DTensors, the local tensors are compared.
inline void expect_equal_bits(const torch::nn::Module& found, const torch::nn::Module& wanted) {
  using detail::local_or_self;
  const auto a = found.named_parameters(), b = wanted.named_parameters();
  ASSERT_EQ(a.size(), b.size());
  for (const auto& item : a) {
    const auto &x = item.value(), &y = b[item.key()];
    EXPECT_TRUE(at::equal(local_or_self(x), local_or_self(y))) << item.key();
    ASSERT_EQ(x.grad().defined(), y.grad().defined()) << item.key();
    if (x.grad().defined()) {
      EXPECT_TRUE(at::equal(local_or_self(x.grad()), local_or_self(y.grad()))) << "gradient of " << item.key();
    }
  }
}

}  // namespace tessera
