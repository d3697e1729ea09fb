#pragma once
#include "tessera/dtensor/dtensor.h"
#include "tessera/testing/ranks.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <vector>

// Compares an op on DTensors with the same op on plain tensors.
namespace tessera::test {

using testing::Rank;
using testing::run_ranks;

// `found` is a DTensor with the values of `expected`.
inline void expect_value(const at::Tensor& found, const at::Tensor& expected) {
  ASSERT_TRUE(is_dtensor(found));
  EXPECT_TRUE(torch::allclose(DTensor(found.detach()).full_tensor(), expected.detach(), 1e-5, 1e-6)) << DTensor(found);
}

// The same, and it has the sizes and strides of `expected`.
inline void expect_value_and_strides(const at::Tensor& found, const at::Tensor& expected) {
  expect_value(found, expected);
  EXPECT_EQ(found.sizes(), expected.sizes());
  EXPECT_EQ(found.strides(), expected.strides());
}

// Calls f on a plain leaf and on a DTensor with each placement, on 1 to `max_ranks` ranks. Compares the results by
// compare(found, expected), and the gradients.
template <class F, class Compare>
void expect_like_plain(const at::Tensor& value, const std::vector<Placement>& placements, int max_ranks,
                       Compare compare, F f) {
  for (int n = 1; n <= max_ranks; n++)
    run_ranks(n, [&](Rank&) {
      const auto mesh = init_device_mesh("cpu", {n}, {"x"});
      for (const auto& p : placements) {
        SCOPED_TRACE(c10::str(n, " ranks, ", to_string(p)));
        auto plain = value.clone().set_requires_grad(true);
        at::Tensor x = distribute_tensor(value, mesh, {p}).set_requires_grad(true);
        const auto expected = f(plain), found = f(x);
        compare(found, expected);
        (expected * expected).sum().backward();
        (found * found).sum().backward();
        expect_value(x.grad(), plain.grad());
      }
    });
}

}  // namespace tessera::test
