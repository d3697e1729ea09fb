#pragma once
#include "tessera/dtensor/detail/meta.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

namespace tessera {

// One training step: zero_grad, forward, backward, optimizer step. Returns the loss.
inline const auto train_step = [](auto& model, auto& opt, const at::Tensor& x) {
  opt.zero_grad();
  auto loss = model(x).pow(2).mean();
  loss.backward();
  opt.step();
  return loss;
};

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
