// The kernels of Numerics::Fast (kernels/cpu_kernel_op.h): each one beside LibTorch and float64, on every kind of
// vectors that this processor has, and the pass that puts them into programs.
#include "tessera/numerics/detail/vector/cpu_kernels.h"
#include "tessera/base/detail/parallel.h"
#include "tessera/compile/api/compile.h"
#include "tessera/compile/detail/kernels/cpu_kernel_op.h"
#include "tessera/testing/expect_error.h"

#include "expect_rewrite.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <ATen/Parallel.h>

namespace tessera::compiler {
namespace cpu_kernels_test {
namespace {

// One function of tensors, and the kernels that its compiled step has.
struct KernelCase {
  std::string what;
  Tensors inputs;
  std::function<at::Tensor(const Tensors&)> function;  // gives a scalar
  std::vector<std::string> kernels;
};

// The result and the gradients of the inputs that need one.
Tensors eager_results(const KernelCase& test, at::ScalarType dtype) {
  Tensors inputs;
  for (const auto& t : test.inputs) {
    auto copy = t.is_floating_point() ? t.detach().to(dtype).clone() : t.clone();
    inputs.push_back(copy.requires_grad_(t.requires_grad()));
  }
  auto result = test.function(inputs);
  result.backward();
  Tensors all = {result.detach()};
  for (const auto& t : inputs)
    if (t.requires_grad()) all.push_back(t.grad());
  return all;
}

Tensors compiled_results(const KernelCase& test, int threads) {
  Tensors inputs;
  for (const auto& t : test.inputs) inputs.push_back(t.detach().clone().requires_grad_(t.requires_grad()));
  const auto before = at::get_num_threads();
  at::set_num_threads(threads);
  auto step = compile(
      [&](Tensors& in) {
        for (auto& t : in) t.mutable_grad().reset();
        auto result = test.function(in);
        result.backward();
        return result;
      },
      {.verified = true, .captures = Captures::None, .numerics = Numerics::Fast});
  step(inputs);
  const auto parts = parts_run_by_other_threads();
  Tensors all = {step(inputs)};
  if (threads == 1 || inputs[0].numel() >= 32768) {
    EXPECT_EQ(parts_run_by_other_threads() > parts, threads > 1) << test.what << ", " << threads << " threads";
  }
  at::set_num_threads(before);
  for (const auto& t : inputs)
    if (t.requires_grad()) all.push_back(t.grad().clone());
  const auto listing = step.listing();
  for (const auto& name : test.kernels)
    EXPECT_NE(listing.find("\"" + name + "\""), std::string::npos) << test.what << ": no " << name << " in\n"
                                                                   << listing;
  return all;
}

double error_of(const at::Tensor& found, const at::Tensor& exact) {
  return found.numel() == 0 ? 0 : (found.to(at::kDouble) - exact).abs().max().item<double>();
}

// As exact as LibTorch, and with the same bits for one and for two threads.
void expect_exact(const KernelCase& test) {
  const auto exact = eager_results(test, at::kDouble), plain = eager_results(test, at::kFloat);
  const auto found = compiled_results(test, 1), with_two = compiled_results(test, 2);
  ASSERT_EQ(found.size(), exact.size()) << test.what;
  for (size_t i = 0; i < exact.size(); i++) {
    const auto largest = exact[i].numel() == 0 ? 0 : exact[i].abs().max().item<double>();
    EXPECT_EQ(found[i].sizes(), exact[i].sizes()) << test.what << ", tensor " << i;
    EXPECT_LE(error_of(found[i], exact[i]), 4 * error_of(plain[i], exact[i]) + 2e-6 * largest + 1e-7)
        << test.what << ", tensor " << i;
    if (i == 0) continue;  // a sum by LibTorch
    EXPECT_TRUE(at::equal(found[i], with_two[i])) << test.what << ", tensor " << i << " differs with two threads";
  }
}

at::Tensor leaf(at::IntArrayRef sizes) { return torch::randn(sizes).requires_grad_(true); }

TEST(CpuKernels, GeluAndItsBackward) {
  for (const std::string approximate : {"none", "tanh"})
    for (const std::vector<int64_t>& sizes : {std::vector<int64_t>{17}, {40, 1000}})
      expect_exact({"gelu " + approximate,
                    {leaf(sizes), torch::randn(sizes)},
                    [=](const Tensors& in) { return (at::gelu(in[0] * 3, approximate) * in[1]).sum(); },
                    {"gelu", "gelu_backward"}});
}

TEST(CpuKernels, ProductsWithGelu) {
  for (const std::string approximate : {"none", "tanh"})
    expect_exact({"linear, gelu, linear",
                  {leaf({2, 65, 128}), leaf({200, 128}), leaf({200}), leaf({129, 200}), leaf({129})},
                  [=](const Tensors& in) {
                    const auto hidden = at::gelu(at::linear(in[0], in[1], in[2]), approximate);
                    return at::linear(hidden, in[3], in[4]).pow(2).mean();
                  },
                  {"sum_rows"}});
}

TEST(CpuKernels, GeluIsAnEpilogueOfTheProductBefore) {
  const std::string start = R"(input %0: f32[64, 32] argument "0"
input %1: f32[32, 48] parameter "w"
input %2: f32[48] parameter "b"
%3: f32[64, 48] = aten.empty_strided([64, 48], [48, 1], 6, none, device("cpu"), none)
)";
  expect_rewrite(
      "cpu_kernels", start + R"(tessera.cpu_kernel([%3!], [%0, %1, %2], [], "matmul")
%4: f32[8, 8, 48] in %3 = aten.view(%3, [8, 8, 48])
%5: f32[8, 8, 48] = aten.gelu(%4, "none")
return %3
return %5
)",
      start + R"(%4: f32[8, 8, 48] = aten.empty_strided([8, 8, 48], [384, 48, 1], 6, none, device("cpu"), none)
tessera.cpu_kernel([%3!, %4!], [%0, %1, %2], [0.0], "matmul_gelu")
%5: f32[8, 8, 48] in %3 = aten.view(%3, [8, 8, 48])
return %3
return %4
)");
}

TEST(CpuKernels, TheDerivativeOfGeluIsAnEpilogueOfTheProductBefore) {
  const std::string start = R"(input %0: f32[64, 32] argument "0"
input %1: f32[32, 48] parameter "w"
input %2: f32[8, 8, 48] argument "1"
%3: f32[64, 48] = aten.empty_strided([64, 48], [48, 1], 6, none, device("cpu"), none)
)";
  auto program = parse(start + R"(tessera.cpu_kernel([%3!], [%0, %1], [], "matmul")
%4: f32[8, 8, 48] in %3 = aten.view(%3, [8, 8, 48])
%5: f32[8, 8, 48] in %3 = aten.gelu_backward.grad_input(%4, %2, "tanh", %4!)
return %5
)");
  EXPECT_EQ(find_pass("cpu_kernels").run(program).times, 1);
  renumber(program);
  verify(program);
  EXPECT_EQ(text_of(program), start + R"(tessera.cpu_kernel([%3!], [%0, %1, %2], [1.0], "matmul_gelu_backward")
%4: f32[8, 8, 48] in %3 = aten.view(%3, [8, 8, 48])
return %4
)");
}

auto cpu_kernel_op() {
  return c10::Dispatcher::singleton()
      .findSchemaOrThrow("tessera::cpu_kernel", "")
      .typed<void(at::TensorList, at::TensorList, c10::ArrayRef<double>, std::string_view)>();
}

TEST(CpuKernels, EpiloguesAreExact) {
  const auto a = torch::randn({37, 300}), b = torch::randn({300, 45}) / 16, bias = torch::randn({45}),
             operand = torch::randn({37, 45});
  auto product = torch::empty({37, 45}), activated = torch::empty({37, 45});
  const auto exact = [](const at::Tensor& t) { return t.to(at::kDouble); };
  for (const double tanh : {0.0, 1.0}) {
    const auto* approximate = tanh != 0 ? "tanh" : "none";
    cpu_kernel_op().call({product, activated}, {a, b, bias}, std::vector<double>{tanh}, "matmul_gelu");
    EXPECT_LE(error_of(product, at::addmm(exact(bias), exact(a), exact(b))), 1e-5);
    EXPECT_LE(error_of(activated, at::gelu(exact(product), approximate)), 1e-6);
    cpu_kernel_op().call({product}, {a, b, operand}, std::vector<double>{tanh}, "matmul_gelu_backward");
    EXPECT_LE(error_of(product, at::gelu_backward(at::mm(exact(a), exact(b)), exact(operand), approximate)), 1e-5);
  }
}

// A gelu that is recomputed in backward stays there, although its operand is a product.
TEST(CpuKernels, GeluIsNoEpilogueOfADistantProduct) {
  const auto text = rewritten("cpu_kernels", R"(input %0: f32[64, 32] argument "0"
input %1: f32[32, 48] parameter "w"
input %2: f32[48] parameter "b"
%3: f32[64, 48] = aten.empty_strided([64, 48], [48, 1], 6, none, device("cpu"), none)
tessera.cpu_kernel([%3!], [%0, %1, %2], [], "matmul")
%4: f32[64, 48] = aten.exp(%3)
%5: f32[64, 48] = aten.gelu(%3, "none")
return %4
return %5
)");
  EXPECT_NE(text.find("\"gelu\""), std::string::npos) << text;
}

TEST(CpuKernels, LayerNormAndItsBackward) {
  for (const int64_t columns : {7, 771})
    expect_exact({"layer norm",
                  {leaf({5, 33, columns}), leaf({columns}), leaf({columns}), torch::randn({5, 33, columns})},
                  [=](const Tensors& in) {
                    const auto y = at::layer_norm(in[0] + 1, {columns}, in[1], in[2]);
                    return ((y + in[0]) * in[3]).sum();  // the residual: backward adds to a gradient
                  },
                  {"layer_norm"}});
}

TEST(CpuKernels, AttentionAndItsBackward) {
  struct Shape {
    int64_t queries, keys, dim;
    bool causal, transposed;
  };
  for (const auto& shape :
       {Shape{128, 128, 64, true, true}, {70, 130, 33, false, false}, {200, 200, 16, true, false}}) {
    const auto heads = [&](int64_t length) {
      return shape.transposed ? leaf({2, length, 3, shape.dim}) : leaf({2, 3, length, shape.dim});
    };
    expect_exact(
        {c10::str("attention ", shape.queries, "x", shape.keys, "x", shape.dim),
         {heads(shape.queries), heads(shape.keys), heads(shape.keys), torch::randn({2, 3, shape.queries, shape.dim})},
         [shape](const Tensors& in) {
           const auto view = [&](size_t i) { return shape.transposed ? in[i].transpose(1, 2) : in[i]; };
           const auto y = at::scaled_dot_product_attention(view(0), view(1), view(2), {}, 0.0, shape.causal);
           return (y * in[3]).sum();
         },
         {"attention", "attention_backward"}});
  }
}

TEST(CpuKernels, CrossEntropyWithoutACopyOfTheLogits) {
  auto target = torch::randint(67, {1024});
  target[3] = -100;
  for (const auto reduction : {at::Reduction::Mean, at::Reduction::Sum})
    expect_exact({"cross entropy",
                  {leaf({1024, 67}), target},
                  [=](const Tensors& in) { return at::cross_entropy_loss(in[0] * 5, in[1], {}, reduction) * 2; },
                  {"cross_entropy", "cross_entropy_backward"}});
}

TEST(CpuKernels, CrossEntropyLeavesOtherUsersOfLogSoftmaxAlone) {
  const auto target = torch::randint(19, {64});
  expect_exact({"log_softmax is used twice",
                {leaf({64, 19}), target},
                [](const Tensors& in) {
                  const auto logarithms = at::log_softmax(in[0] * 5, 1);
                  return at::nll_loss(logarithms, in[1]) + logarithms.exp().pow(2).sum();
                },
                {}});
}

TEST(CpuKernels, ATargetOutOfBoundsIsAnError) {
  auto step = compile([](const at::Tensor& x, const at::Tensor& y) { return at::cross_entropy_loss(x, y); },
                      {.captures = Captures::None, .numerics = Numerics::Fast});
  const auto x = torch::randn({4, 5});
  step(x, torch::tensor({0, 1, 2, 3}));
  EXPECT_THROW(step(x, torch::tensor({0, 1, 2, 5})), c10::IndexError);
}

// Special values are those of LibTorch. Not compared: gelu(infinity), for which LibTorch's vectors give a NaN.
TEST(CpuKernels, SpecialValues) {
  const auto nan = std::numeric_limits<float>::quiet_NaN();
  const auto x = torch::tensor({0.0F, -0.0F, nan, 1e30F, -1e30F, 1e-40F, 100.0F, -100.0F, 3.0F});
  for (const bool tanh : {false, true}) {
    const auto wanted = at::gelu(x, tanh ? "tanh" : "none");
    for (const auto* kernels : numerics::all_cpu_kernels().kernels) {
      if (!kernels) continue;
      auto found = torch::empty_like(x);
      kernels->gelu(x.const_data_ptr<float>(), found.mutable_data_ptr<float>(), x.numel(), tanh);
      EXPECT_TRUE(at::allclose(found, wanted, 1e-6, 1e-7, /*equal_nan=*/true)) << kernels->name << "\n"
                                                                               << found << wanted;
    }
  }
}

// Every processor with fused multiply-add has the same bits, for every part of a product.
TEST(CpuKernels, ProductsHaveTheSameBitsOnAllProcessors) {
  for (const auto& [m, n, k] : {std::array<int64_t, 3>{1, 1, 1}, {13, 70, 300}, {64, 33, 5}, {9, 200, 0}})
    for (int layout = 0; layout < 4; layout++) {
      const auto a = layout % 2 ? torch::randn({k, m}).t() : torch::randn({m, k}),
                 b = layout / 2 ? torch::randn({n, k}).t() : torch::randn({k, n});
      const auto by_scalars = torch::zeros({m, n});
      const auto left = a.accessor<float, 2>(), right = b.accessor<float, 2>();
      auto exact = by_scalars.accessor<float, 2>();
      for (int64_t i = 0; i < m; i++)
        for (int64_t j = 0; j < n; j++) {
          for (int64_t block = 0; block < k; block += 256) {
            float sum = 0;
            for (int64_t l = block; l < std::min<int64_t>(k, block + 256); l++)
              sum = std::fma(left[i][l], right[l][j], sum);
            exact[i][j] += sum;
          }
        }
      for (const auto* kernels : numerics::all_cpu_kernels().kernels) {
        if (!kernels || std::string(kernels->name) == "baseline") continue;
        auto out = torch::full({m, n}, 7.0F);
        const numerics::ProductOperands<float> product{m,
                                                       n,
                                                       k,
                                                       {a.const_data_ptr<float>(), a.stride(0), a.stride(1)},
                                                       {b.const_data_ptr<float>(), b.stride(0), b.stride(1)},
                                                       {out.mutable_data_ptr<float>(), n, 1}};
        for (int64_t j = 0; j < n; j += 2 * kernels->product_columns)
          kernels->multiply(product, 0, m, j, std::min(n, j + 2 * kernels->product_columns));
        EXPECT_TRUE(at::equal(out, by_scalars)) << kernels->name << " " << m << "x" << n << "x" << k << ", " << layout;
      }
    }
}

// Programs can be parsed from text: a call with wrong operands must not touch memory.
TEST(CpuKernels, RefuseOtherOperands) {
  const auto op = cpu_kernel_op();
  const auto x = torch::ones({4, 4}), bytes = torch::ones({4, 4}, at::kByte);
  EXPECT_ERROR(UsageError, op.call({x}, {x}, {}, "nonsense"), "unknown kernel");
  for (const auto& name : cpu_kernel_names()) {
    for (size_t outs = 1; outs <= 3; outs++)
      for (size_t ins = 1; ins <= 6; ins++)
        for (const auto& wrong : {bytes, torch::ones({3, 4}), torch::ones({4, 8}).slice(1, 0, 8, 2)})
          EXPECT_THROW(op.call(Tensors(outs, x), Tensors(ins, wrong), std::vector<double>{0}, name), UsageError)
              << name;
  }
}

}  // namespace
}  // namespace cpu_kernels_test
}  // namespace tessera::compiler
