#pragma once
#include "tessera/cuda/detail/cross_entropy.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

// cross_entropy_rows beside LibTorch's loss.
namespace tessera::cuda {

struct LossAndGradient {
  at::Tensor loss, gradient;
};

inline LossAndGradient of_libtorch(const at::Tensor& logits, const at::Tensor& targets) {
  const auto x = logits.detach().clone().set_requires_grad(true);
  auto loss = at::cross_entropy_loss(x.to(at::kFloat), targets, {}, at::Reduction::None);
  loss.mul(2).sum().backward();
  return {loss.detach(), x.grad()};
}

inline LossAndGradient of_kernel(const at::Tensor& logits, const at::Tensor& targets, bool reuse_logits) {
  const auto x = logits.detach().clone().set_requires_grad(true);
  const auto computed = x.view_as(x), copy = logits.clone();
  auto loss = cross_entropy_rows(computed, targets, -100, reuse_logits);
  loss.mul(2).sum().backward({}, /*retain_graph=*/true);
  EXPECT_TRUE(at::equal(x.detach(), copy)) << "a graph that is kept needs its logits";
  x.mutable_grad().reset();
  loss.mul(2).sum().backward();
  EXPECT_EQ(at::equal(x.detach(), copy), !reuse_logits || logits.numel() == 0);
  return {loss.detach(), x.grad()};
}

inline void expect_as_libtorch(at::Device device, at::ScalarType dtype, int64_t rows, int64_t classes) {
  torch::manual_seed(1);
  const auto logits = (torch::randn({rows, classes}, device) * 4).to(dtype);
  auto targets = torch::randint(classes, {rows}, at::device(device).dtype(at::kLong));
  if (rows > 1) targets[1] = -100;
  for (const bool reuse_logits : {false, true}) {
    const auto expected = of_libtorch(logits, targets), found = of_kernel(logits, targets, reuse_logits);
    SCOPED_TRACE(c10::str(device, " ", dtype, " ", rows, " x ", classes, reuse_logits ? ", reused" : ""));
    EXPECT_TRUE(at::allclose(found.loss, expected.loss, 1e-5, 1e-5));
    EXPECT_EQ(found.gradient.scalar_type(), dtype);
    const double tolerance = dtype == at::kFloat ? 1e-5 : 1e-2;  // exp2 and log2 of the device are approximate
    EXPECT_TRUE(
        at::allclose(found.gradient.to(at::kFloat), expected.gradient.to(at::kFloat), tolerance, tolerance / 10));
  }
}

}  // namespace tessera::cuda
