// Products in bfloat16 on a processor that has instructions for it: the kernel (bfloat16_product.inc), the pass
// that puts it into programs (widen_bfloat16), and steps beside eager mode.
#include "tessera/compile/api/compile.h"
#include "tessera/compile/detail/passes/passes.h"
#include "tessera/numerics/detail/vector/bfloat16_product.h"
#include "tessera/optim/adam.h"
#include "tessera/testing/expect_error.h"

#include "expect_rewrite.h"

#include <ATen/Parallel.h>
#include <ATen/autocast_mode.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

namespace tessera::compiler {
namespace bfloat16_test {
namespace {

class Bfloat16 : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!numerics::cpu_kernels().multiply_bfloat16) GTEST_SKIP() << "this processor has no AVX-512 BF16";
  }
};

// By rows or by columns, with or without gaps.
at::Tensor matrix(int64_t rows, int64_t columns, int layout, at::ScalarType dtype) {
  const int64_t gap = layout / 2 * 3;
  const bool by_rows = layout % 2 == 0;
  const auto all = (by_rows ? torch::randn({rows, columns + gap}) : torch::randn({columns, rows + gap})).to(dtype);
  return by_rows ? all.narrow(1, 0, columns) : all.narrow(1, 0, rows).t();
}

TEST_F(Bfloat16, ProductsRoundTheirOperandsAndNothingElse) {
  const int64_t shapes[][3] = {{1, 1, 1},     {3, 5, 0},     {4, 0, 5},      {17, 33, 7},
                               {9, 100, 513}, {520, 40, 64}, {64, 256, 1030}};
  for (const auto& [m, n, k] : shapes)
    for (int layout = 0; layout < 16; layout++)
      for (const bool is_float : {false, true}) {
        torch::manual_seed(layout);
        const auto dtype = is_float ? at::kFloat : at::kBFloat16;
        const auto a = matrix(m, k, layout % 4, dtype), b = matrix(k, n, layout / 4, at::kBFloat16);
        const auto bias = torch::randn({n});
        const auto exact = a.to(at::kBFloat16).to(at::kDouble).mm(b.to(at::kDouble)) + bias;
        auto out = torch::empty({m, n});
        numerics::bfloat16_product(out, a, b, {.bias = bias});
        EXPECT_TRUE(at::allclose(out.to(at::kDouble), exact, 0, 1e-5 * std::sqrt(static_cast<double>(k + 1))))
            << m << " x " << n << " x " << k << ", layout " << layout << ", float " << is_float;
        const auto threads = at::get_num_threads();
        at::set_num_threads(2);
        auto with_two = torch::empty({m, n});
        numerics::bfloat16_product(with_two, a, b, {.bias = bias});
        at::set_num_threads(threads);
        EXPECT_TRUE(at::equal(out, with_two)) << "two threads";
      }
}

TEST_F(Bfloat16, BadOperandsAreRefused) {
  const auto a = torch::randn({4, 8}), out = torch::empty({4, 4});
  EXPECT_ERROR(UsageError, numerics::bfloat16_product(out, a, torch::randn({8, 4}).to(at::kDouble)), "b must be");
  EXPECT_ERROR(UsageError, numerics::bfloat16_product(out, a, torch::randn({7, 4})), "a is [4, 8]", "b is [7, 4]");
  EXPECT_ERROR(UsageError, numerics::bfloat16_product(torch::empty({4, 4}).t(), a, torch::randn({8, 4})),
               "out must be");
}

// The product rounds %0. Memory of the caller keeps its dtype. The signs of results are equal; their values differ by a
// rounding.
TEST_F(Bfloat16, ThePassRoundsInProductsAlone) {
  expect_rewrite("widen_bfloat16", R"(input %0: f32[64, 32] argument "0"
input %1: bf16[32, 48] parameter "w"
input %2: bf16[48] parameter "b"
%3: bf16[64, 32] = aten._to_copy(%0, 15, none, none, none, false, none)
%4: bf16[64, 48] = aten.addmm(%2, %3, %1, 1, 1)
%5: bf16[64, 48] = aten.relu(%4)
%6: bf16[64, 48] = aten.sign(%5)
%7: f32[64, 48] = aten._to_copy(%5, 6, none, none, none, false, none)
%8: f32[64, 48] = aten.sign(%7)
return %6
return %8
)",
                 R"(input %0: f32[64, 32] argument "0"
input %1: bf16[32, 48] parameter "w"
input %2: bf16[48] parameter "b"
%3: f32[48] = aten._to_copy(%2, 6, none, none, none, false, none)
%4: f32[64, 48] = aten.empty_strided([64, 48], [48, 1], 6, none, device("cpu"), none)
tessera.cpu_kernel([%4!], [%0, %1, %3], [], "matmul_bf16")
%5: f32[64, 48] = aten.relu(%4)
%6: f32[64, 48] = aten.sign(%5)
%7: bf16[64, 48] = aten._to_copy(%6, 15, none, none, none, false, none)
%8: f32[64, 48] = aten.sign(%5)
return %7
return %8
)");
}

TEST_F(Bfloat16, AValueThatIsWrittenLaterIsCopied) {
  const std::string start = R"(input %0: f32[64, 64] argument "0"
input %1: bf16[64, 64] parameter "w"
)";
  auto program = parse(start + R"(%2: bf16[64, 64] = aten._to_copy(%0, 15, none, none, none, false, none)
%3: f32[64, 64] in %0 = aten.zero_(%0!)
%4: bf16[64, 64] = aten.mm(%2, %1)
%5: f32[64, 64] = aten._to_copy(%4, 6, none, none, none, false, none)
return %5
)");
  widen_bfloat16(program);
  verify(program);
  const auto x = torch::randn({64, 64}), w = torch::randn({64, 64}).to(at::kBFloat16);
  const auto wanted = x.to(at::kBFloat16).mm(w).to(at::kFloat);
  EXPECT_TRUE(at::allclose(interpret(program, {x.clone(), w})[0], wanted, 1e-2, 1e-2)) << text_of(program);
}

// %4 is returned, so it stays bfloat16, and %3 with it.
TEST_F(Bfloat16, AnOpThatWritesIntoReturnedMemoryComputesInItsDtype) {
  auto program = parse(R"(input %0: bf16[64, 64] argument "0"
%1: bf16[64, 64] = aten.mm(%0, %0)
%2: bf16[64, 64] = aten.relu(%1)
%3: bf16[64, 64] = aten.mul.Tensor(%2, 2)
%4: bf16[64, 64] = aten.neg(%2)
aten._foreach_add_.List([%3!, %4!], [%1, %1], 1)
%5: bf16[64, 64] = aten.add.Tensor(%3, %2, 1)
return %4
return %5
)");
  const auto original = program;
  widen_bfloat16(program);
  verify(program);
  EXPECT_NE(text_of(program).find("\"matmul_bf16\""), std::string::npos);
  const auto x = torch::randn({64, 64}).to(at::kBFloat16);
  const auto found = interpret(program, {x}), wanted = interpret(original, {x});
  for (size_t i = 0; i < found.size(); i++) {
    EXPECT_EQ(found[i].scalar_type(), at::kBFloat16);
    EXPECT_TRUE(at::allclose(found[i], wanted[i], 3e-2, 3e-1)) << i;
  }
}

TEST_F(Bfloat16, OpsThatAreFasterInBfloat16KeepIt) {
  for (const auto* kept :
       {"%4: bf16[4, 32, 32] = aten.bmm(%3, %5)", "%4: bf16[4, 32, 16] = aten.bernoulli.p(%3, 0.5, none)"}) {
    auto program = parse(c10::str(R"(input %0: bf16[64, 64] argument "0"
input %1: bf16[64, 32] parameter "w"
%2: bf16[64, 32] = aten.mm(%0, %1)
%3: bf16[4, 32, 16] in %2 = aten.view(%2, [4, 32, 16])
%5: bf16[4, 16, 32]{512, 1, 16} in %2 = aten.transpose.int(%3, 1, 2)
)",
                                  kept, "\nreturn %4\n"));
    widen_bfloat16(program);
    verify(program);
    const auto text = text_of(program);
    EXPECT_NE(text.find("\"matmul_bf16\""), std::string::npos) << text;
    EXPECT_NE(text.find("bf16[4, 32, 16] = aten._to_copy"), std::string::npos) << text;
  }
}

// A block with attention. The gradient of the bias of `key` is exactly 0: what eager mode and the program compute is
// the rounding of terms that cancel.
struct AttentionImpl : torch::nn::Module {
  AttentionImpl() {
    query = register_module("query", torch::nn::Linear(64, 64)),
    key = register_module("key", torch::nn::Linear(64, 64));
    value = register_module("value", torch::nn::Linear(64, 64)), norm = register_module("norm", make_norm());
    up = register_module("up", torch::nn::Linear(64, 256)), down = register_module("down", torch::nn::Linear(256, 64));
  }
  static torch::nn::LayerNorm make_norm() { return torch::nn::LayerNorm(torch::nn::LayerNormOptions({64})); }
  at::Tensor forward(const at::Tensor& x) {
    const auto heads = [&](torch::nn::Linear& linear) {
      return linear(x).view({x.size(0), x.size(1), 2, 32}).transpose(1, 2);
    };
    const auto y = at::scaled_dot_product_attention(heads(query), heads(key), heads(value), {}, 0.0, true);
    const auto z = x + y.transpose(1, 2).flatten(2);
    return z + down(at::gelu(up(norm(z))));
  }
  torch::nn::Linear query = nullptr, key = nullptr, value = nullptr, up = nullptr, down = nullptr;
  torch::nn::LayerNorm norm = nullptr;
};
TORCH_MODULE(Attention);

const auto attention_step = [](auto& model, auto& opt, const at::Tensor& x, bool autocast) {
  opt.zero_grad();
  at::autocast::set_autocast_enabled(at::kCPU, autocast);
  auto out = model->forward(x);
  at::autocast::clear_cache();
  at::autocast::set_autocast_enabled(at::kCPU, false);
  auto loss = out.to(at::kFloat).pow(2).mean();
  loss.backward();
  opt.step();
  return loss;
};

// With bfloat16 parameters and with autocast over float32 ones. The checks compare the first four calls with eager
// mode, gradients included.
TEST(Bfloat16Steps, AreCloseToEagerMode) {
  for (const bool autocast : {false, true}) {
    std::vector<double> losses[2];
    for (const bool is_compiled : {false, true}) {
      torch::manual_seed(5);
      Attention model;
      if (!autocast) model->to(at::kBFloat16);
      optim::AdamW opt(model->parameters(), {.lr = 1e-3, .fused = true});
      auto compiled = compile(
          attention_step,
          {.backend = is_compiled ? "tessera" : "eager", .verified = true, .check = 4, .numerics = Numerics::Fast});
      for (int i = 0; i < 8; i++) {
        const auto x = torch::randn({2, 64, 64}).to(autocast ? at::kFloat : at::kBFloat16);
        losses[is_compiled].push_back(compiled(model, opt, x, autocast).template item<double>());
      }
      if (!is_compiled || !numerics::cpu_kernels().multiply_bfloat16) continue;
      const auto listing = compiled.listing();
      for (const auto* kernel : {"\"attention\"", "\"attention_backward\"", "\"matmul_gelu_bf16\""})
        EXPECT_NE(listing.find(kernel), std::string::npos) << autocast << kernel << listing;
    }
    for (size_t i = 0; i < losses[0].size(); i++)
      EXPECT_NEAR(losses[0][i], losses[1][i], 1e-2 * losses[0][i]) << "autocast " << autocast << ", step " << i;
  }
}

// A planted error of 10 % in one gradient: more than roundings, and less than the tolerance that bfloat16 had.
TEST_F(Bfloat16, AWrongGradientIsFoundBesideRoundings) {
  const Pass wrong{
      "wrong", [](Program& program) {
        for (auto& output : program.outputs) {
          if (output.name != "down.weight") continue;
          const auto scaled = program.add(program[output.value].type);
          program.nodes.push_back({find_op("aten.mul.Scalar"), {output.value, c10::IValue(1.1)}, {scaled}});
          output.value = scaled;
        }
        return Matched{1};
      }};
  torch::manual_seed(5);
  Attention model;
  optim::AdamW opt(model->parameters(), {.lr = 1e-3, .fused = true});
  auto compiled = compile(attention_step, {.passes = PassList{wrong}, .check = 1, .numerics = Numerics::Fast});
  EXPECT_ERROR(UsageError, compiled(model, opt, torch::randn({2, 64, 64}), true), "the gradient of down.weight");
}

}  // namespace
}  // namespace bfloat16_test
}  // namespace tessera::compiler
