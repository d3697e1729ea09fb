#include "tessera/numerics/numerics.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>

namespace {

using UnaryOp = std::function<at::Tensor(const at::Tensor&)>;

const std::pair<const char*, UnaryOp> kElementwiseOps[] = {
    {"gelu", [](const at::Tensor& x) { return at::gelu(x); }},
    {"gelu tanh", [](const at::Tensor& x) { return at::gelu(x, "tanh"); }},
    {"gelu_backward tanh", [](const at::Tensor& x) { return at::gelu_backward(x, x + 1, "tanh"); }},
    {"silu", [](const at::Tensor& x) { return at::silu(x); }},
    {"silu_backward", [](const at::Tensor& x) { return at::silu_backward(x, x + 1); }},
    {"sigmoid", [](const at::Tensor& x) { return at::sigmoid(x); }},
    {"tanh", [](const at::Tensor& x) { return at::tanh(x); }},
    {"exp", [](const at::Tensor& x) { return at::exp(x); }},
    {"log", [](const at::Tensor& x) { return at::log(x.abs() + 0.1); }},
    {"pow", [](const at::Tensor& x) { return at::pow(x.abs() + 0.1, 1.7); }},
    {"sin", [](const at::Tensor& x) { return at::sin(x); }},
    {"erf", [](const at::Tensor& x) { return at::erf(x); }},
    {"rsqrt", [](const at::Tensor& x) { return at::rsqrt(x.abs() + 0.1); }},
    {"softplus", [](const at::Tensor& x) { return at::softplus(x); }},
    {"add alpha", [](const at::Tensor& x) { return at::add(x, x * 1.3, 0.7); }},
    {"addcmul", [](const at::Tensor& x) { return at::addcmul(x, x * 1.3, x + 2, 0.7); }},
    {"addcdiv", [](const at::Tensor& x) { return at::addcdiv(x, x * 1.3, x.abs() + 2, 0.7); }},
    {"lerp", [](const at::Tensor& x) { return at::lerp(x, x * 1.3, 0.3); }},
    {"add_ alpha", [](const at::Tensor& x) { return x.clone().add_(x * 1.3, 0.7); }},
};

// Parts of the tensor in which the op gives an element other bits than in the full tensor.
int64_t parts_that_differ(const UnaryOp& op, const at::Tensor& x) {
  const auto full = op(x);
  int64_t differ = 0;
  for (const int64_t length : {1, 3, 7, 17, 31, 100, 333})
    for (const int64_t first : {0, 1, 5, 64, 200})
      differ += !torch::equal(op(x.narrow(0, first, length)), full.narrow(0, first, length));
  return differ;
}

TEST(InvariantElementwise, AnElementHasTheSameBitsAtEveryOffsetAndLength) {
  const auto x = torch::randn({1000}) * 3;
  int64_t differ_by_default = 0;
  for (const auto& [name, op] : kElementwiseOps) {
    differ_by_default += parts_that_differ(op, x) > 0;
    const tessera::NumericsScope scope(tessera::Numerics::Invariant);
    EXPECT_EQ(parts_that_differ(op, x), 0) << name;
  }
  EXPECT_GT(differ_by_default, 0);  // otherwise this test could not fail
}

TEST(InvariantElementwise, StridesBroadcastingAndThreadsDoNotMatter) {
  const auto x = torch::randn({37, 61}), row = torch::randn({61});
  const int threads = at::get_num_threads();
  const auto large = torch::randn({100003});
  const auto all = [&] {
    const tessera::NumericsScope scope(tessera::Numerics::Invariant);
    return std::vector<at::Tensor>{at::gelu(x, "tanh"), at::gelu(x.t(), "tanh").t(), at::add(x, row, 0.7),
                                   at::add(x.t().contiguous().t(), row, 0.7), at::gelu(large, "tanh")};
  };
  const auto expected = all();
  EXPECT_TRUE(torch::equal(expected[0], expected[1]));
  EXPECT_TRUE(torch::equal(expected[2], expected[3]));
  EXPECT_EQ(expected[1].strides(), x.strides());
  for (const int n : {2, 3}) {
    at::set_num_threads(n);
    const auto found = all();  // at most 16,384 elements in one call of ATen, which runs on one thread
    for (size_t i = 0; i < found.size(); i++) EXPECT_TRUE(torch::equal(found[i], expected[i])) << i;
  }
  at::set_num_threads(threads);
  EXPECT_TRUE(torch::allclose(expected[0], at::gelu(x, "tanh"), 1e-5, 1e-6));
}

}  // namespace
