#include "tessera/cuda/detail/fused_kernels.h"
#include "tessera/cuda/detail/transformer_kernels.h"
#include "tests/cuda/losses.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

namespace tessera::cuda {
namespace {

using Tensors = std::vector<at::Tensor>;

void call_kernel(const char* name, const Tensors& outs, const Tensors& ins, const std::vector<double>& numbers = {}) {
  std::vector<c10::IValue> stack = {outs, ins, numbers, std::string(name)};
  c10::Dispatcher::singleton().findSchemaOrThrow("tessera::cuda_kernel", "").callBoxed(stack);
}

bool close(const at::Tensor& a, const at::Tensor& b, double rtol, double atol) {
  return at::allclose(a.to(at::kFloat), b.to(at::kFloat), rtol, atol);
}

at::TensorOptions bf16_on_cuda() { return at::device(at::kCUDA).dtype(at::kBFloat16); }

class FusedKernels : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!torch::cuda::is_available()) GTEST_SKIP() << "no CUDA device";
    torch::manual_seed(2);
  }
};

TEST_F(FusedKernels, CrossEntropyIsLibTorchs) {
  for (const auto dtype : {at::kFloat, at::kBFloat16})
    for (const int64_t classes : {8, 64, 50304}) {
      ASSERT_TRUE(has_cross_entropy(torch::empty({1, classes}, at::device(at::kCUDA).dtype(dtype))));
      expect_as_libtorch(at::Device(at::kCUDA, 0), dtype, 33, classes);
    }
}

struct LayerNormCase {
  at::Tensor x, addend, grad, weight, bias;
  int64_t length;
  LayerNormCase(int64_t rows, int64_t length)
      : x(torch::randn({rows, length}, bf16_on_cuda()) * 3 + 1),
        addend(torch::randn_like(x)),
        grad(torch::randn_like(x)),
        weight(torch::randn({length}, bf16_on_cuda())),
        bias(torch::randn({length}, bf16_on_cuda())),
        length(length) {}
};

TEST_F(FusedKernels, LayerNormIsLibTorchs) {
  for (const int64_t rows : {1, 7, 8, 4099})
    for (const int64_t length : {256, 768, 1024}) {
      SCOPED_TRACE(c10::str(rows, " x ", length));
      const LayerNormCase c(rows, length);
      ASSERT_TRUE(has_layer_norm(c.x.device(), c.x.scalar_type(), length));
      const auto [y, mean, rstd] = at::native_layer_norm(c.x, {length}, c.weight, c.bias, 1e-5);
      Tensors found = {at::empty_like(y), at::empty_like(mean), at::empty_like(rstd)};
      call_kernel("layer_norm", found, {c.x, c.weight, c.bias}, {1e-5});
      EXPECT_TRUE(close(found[0], y, 1e-2, 1e-2) && close(found[1], mean, 1e-4, 1e-5) &&
                  close(found[2], rstd, 1e-4, 0));

      const auto total = c.x + c.addend;
      const auto [y2, mean2, rstd2] = at::native_layer_norm(total, {length}, c.weight, c.bias, 1e-5);
      Tensors added = {at::empty_like(total), at::empty_like(y), at::empty_like(mean), at::empty_like(rstd)};
      call_kernel("add_layer_norm", added, {c.x, c.addend, c.weight, c.bias}, {1e-5});
      EXPECT_TRUE(at::equal(added[0], total));
      EXPECT_TRUE(close(added[1], y2, 1e-2, 1e-2) && close(added[2], mean2, 1e-4, 1e-5));
      EXPECT_TRUE(close(added[3], rstd2, 1e-4, 0));
    }
}

TEST_F(FusedKernels, LayerNormBackwardIsLibTorchs) {
  for (const int64_t rows : {1, 7, 8, 4099})
    for (const int64_t length : {256, 768, 1024}) {
      SCOPED_TRACE(c10::str(rows, " x ", length));
      const LayerNormCase c(rows, length);
      const auto [y, mean, rstd] = at::native_layer_norm(c.x, {length}, c.weight, c.bias, 1e-5);
      const auto [dx, dw, db] =
          at::native_layer_norm_backward(c.grad, c.x, {length}, mean, rstd, c.weight, c.bias, {true, true, true});
      const double scale = 1e-2 * std::sqrt(static_cast<double>(rows));
      for (const bool adds : {false, true}) {
        Tensors found = {adds ? c.addend.clone() : at::empty_like(dx), at::empty_like(dw), at::empty_like(db)};
        call_kernel(adds ? "layer_norm_backward_add" : "layer_norm_backward", found,
                    {c.grad, c.x, mean, rstd, c.weight});
        EXPECT_TRUE(close(found[0], adds ? c.addend + dx : dx, 1e-2, 2e-2));
        EXPECT_TRUE(close(found[1], dw, 1e-2, scale) && close(found[2], db, 1e-2, scale));
      }
    }
}

TEST_F(FusedKernels, RmsNormIsLibTorchs) {
  for (const int64_t rows : {1, 7, 8, 4099})
    for (const int64_t length : {256, 768, 1024})
      for (const bool adds : {false, true}) {
        SCOPED_TRACE(c10::str(rows, " x ", length, adds ? " with a sum" : ""));
        const LayerNormCase c(rows, length);
        const auto x = adds ? c.x + c.addend : c.x;
        const auto [y, rstd] = at::_fused_rms_norm(x, {length}, c.weight, 1e-5);
        Tensors found = {at::empty_like(y), at::empty_like(rstd)};
        if (adds) found.insert(found.begin(), at::empty_like(x));
        call_kernel(adds ? "add_rms_norm" : "rms_norm", found,
                    adds ? Tensors{c.x, c.addend, c.weight} : Tensors{c.x, c.weight}, {1e-5});
        EXPECT_TRUE(!adds || at::equal(found[0], x));
        EXPECT_TRUE(close(found[adds], y, 1e-2, 1e-2) && close(found[adds + 1], rstd, 1e-4, 0));

        const auto [dx, dw] = at::_fused_rms_norm_backward(c.grad, x, {length}, rstd, c.weight, {true, true});
        Tensors gradients = {adds ? c.addend.clone() : at::empty_like(dx), at::empty_like(dw)};
        call_kernel(adds ? "rms_norm_backward_add" : "rms_norm_backward", gradients, {c.grad, x, rstd, c.weight});
        EXPECT_TRUE(close(gradients[0], adds ? c.addend + dx : dx, 1e-2, 2e-2));
        EXPECT_TRUE(close(gradients[1], dw, 1e-2, 1e-2 * std::sqrt(static_cast<double>(rows))));
      }
}

TEST_F(FusedKernels, SumRowsIsLibTorchsSum) {
  for (const int64_t rows : {1, 7, 4099, 32768})
    for (const int64_t columns : {8, 264, 768, 3072}) {
      SCOPED_TRACE(c10::str(rows, " x ", columns));
      const auto x = torch::randn({rows, columns}, bf16_on_cuda());
      ASSERT_TRUE(has_sum_rows(x.device(), x.scalar_type(), columns));
      const auto sum = at::empty({columns}, x.options());
      call_kernel("sum_rows", {sum}, {x});
      EXPECT_TRUE(close(sum, x.to(at::kFloat).sum(0), 1e-2, 1e-2));
    }
}

// With gradients. The reference is registered for the CPU.
TEST_F(FusedKernels, RotaryAndSwigluAreLibTorchs) {
  const auto beside_cpu = [](const auto& f, Tensors inputs, const Tensors& others) {
    const auto run = [&](at::Device device) {
      Tensors x, y = others;
      for (const auto& t : inputs) x.push_back(t.to(device, at::kBFloat16).clone().set_requires_grad(true));
      for (auto& t : y) t = t.to(device);
      const auto result = f(x, y);
      (result * result).sum().backward();
      Tensors all = {result.detach().cpu()};
      for (const auto& t : x) all.push_back(t.grad().cpu());
      return all;
    };
    const auto expected = run(at::kCPU), found = run(at::Device(at::kCUDA, 0));
    for (size_t i = 0; i < expected.size(); i++) EXPECT_TRUE(close(found[i], expected[i], 2e-2, 2e-2)) << i;
  };
  const auto angle = torch::randn({7, 32});
  const auto table = at::stack({angle.cos(), angle.sin()}, -1);
  ASSERT_TRUE(has_rotary(torch::empty({3, 7, 5, 64}, bf16_on_cuda()), table.to(at::kCUDA)));
  beside_cpu([](const Tensors& x, const Tensors& y) { return rotary(x[0], y[0]); }, {torch::randn({3, 7, 5, 64})},
             {table});
  ASSERT_TRUE(has_swiglu(torch::empty({11, 40}, bf16_on_cuda()), torch::empty({11, 40}, bf16_on_cuda())));
  beside_cpu([](const Tensors& x, const Tensors&) { return swiglu(x[0], x[1]); },
             {torch::randn({11, 40}), torch::randn({11, 40})}, {});
}

// Row-major and transposed operands, as in forward, in input gradients and in weight gradients.
TEST_F(FusedKernels, MatmulIsLibTorchs) {
  for (const bool transposed_a : {false, true})
    for (const bool transposed_b : {false, true})
      for (const int64_t rows : {8, 136, 4096}) {
        SCOPED_TRACE(c10::str(rows, transposed_a ? ", a transposed" : "", transposed_b ? ", b transposed" : ""));
        const int64_t inner = 64, columns = 264;
        const auto a = transposed_a ? torch::randn({inner, rows}, bf16_on_cuda()).t()
                                    : torch::randn({rows, inner}, bf16_on_cuda());
        const auto b = transposed_b ? torch::randn({columns, inner}, bf16_on_cuda()).t()
                                    : torch::randn({inner, columns}, bf16_on_cuda());
        const auto bias = torch::randn({columns}, bf16_on_cuda());
        const auto product = at::mm(a.to(at::kFloat), b.to(at::kFloat));
        const auto out = at::empty({rows, columns}, bf16_on_cuda()), aux = at::empty_like(out);
        call_kernel("matmul", {out}, {a, b});
        EXPECT_TRUE(close(out, product, 1e-2, 1e-2));
        call_kernel("matmul_bias", {out}, {a, b, bias});
        EXPECT_TRUE(close(out, product + bias, 1e-2, 1e-2));
        call_kernel("matmul_gelu", {out, aux}, {a, b, bias});
        EXPECT_TRUE(close(aux, product + bias, 1e-2, 1e-2));
        EXPECT_TRUE(close(out, at::gelu(product + bias, "tanh"), 1e-2, 2e-2));
        const auto wanted = at::gelu_backward(product, aux.to(at::kFloat), "tanh");
        call_kernel("matmul_gelu_grad", {out}, {a, b, aux});
        EXPECT_TRUE(close(out, wanted, 1e-2, 5e-2));
      }
}

}  // namespace
}  // namespace tessera::cuda
