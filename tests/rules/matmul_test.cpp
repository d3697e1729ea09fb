#include "tests/rules/family_test.h"

#include <ATen/ops/allclose.h>
#include <ATen/ops/full.h>
#include <ATen/ops/tensor.h>
#include <torch/headeronly/version.h>

namespace tessera::testing {
namespace {

const auto a = [] { return numbers({5, 3}); };
const auto b = [] { return numbers({3, 4}); };
const auto batch_a = [] { return numbers({2, 5, 3}); };
const auto batch_b = [] { return numbers({2, 3, 4}); };

at::Tensor in_float32(c10::IntArrayRef sizes) { return numbers(sizes).to(at::kFloat); }
at::Tensor ends(const std::vector<int>& ends) { return at::tensor(ends, at::kInt); }

Sample foreach_mm() {
  if (TORCH_VERSION_MINOR < 13) return {"aten::mm", {a(), b()}, {}};  // 2.11 lacks it
  return {"aten::_foreach_mm",
          {c10::List<at::Tensor>({numbers({5, 3}), numbers({4, 2})}),
           c10::List<at::Tensor>({numbers({3, 4}), numbers({2, 5})})},
          {}};
}

TEST(MatmulRules, HoldByBruteForce) {
  expect_family_holds(
      "matmul",
      {
          foreach_mm(),
          {"aten::mm", {a(), b()}, {}},
          {"aten::mm", {numbers({3, 5}).t(), numbers({4, 3}).t()}, {}},
          {"aten::bmm", {batch_a(), batch_b()}, {}},
          {"aten::mv", {a(), numbers({3})}, {}},
          {"aten::dot", {numbers({5}), numbers({5})}, {}},
          {"aten::vdot", {numbers({5}), numbers({5})}, {}},
          {"aten::addmm", {numbers({4}), a(), b()}, {}},
          {"aten::addmm", {numbers({5, 1}), a(), b()}, {}},
          {"aten::addmm", {numbers({5, 4}), a(), b(), 0.5, 2.0}, {}},
          {"aten::addmm", {numbers({}), a(), b()}, {0}},
          {"aten::addmv", {numbers({1}), a(), numbers({3})}, {}},
          {"aten::addmm_", {numbers({5, 4}), a(), b()}, {}},
          {"aten::addmv", {numbers({5}), a(), numbers({3})}, {}},
          {"aten::addmv_", {numbers({5}), a(), numbers({3})}, {}},
          {"aten::addr", {numbers({5, 3}), numbers({5}), numbers({3})}, {}},
          {"aten::addr_", {numbers({5, 3}), numbers({5}), numbers({3})}, {}},
          {"aten::baddbmm", {numbers({2, 5, 4}), batch_a(), batch_b()}, {}},
          {"aten::baddbmm", {numbers({4}), batch_a(), batch_b()}, {}},
          {"aten::baddbmm_", {numbers({2, 5, 4}), batch_a(), batch_b()}, {}},
          {"aten::addbmm", {numbers({5, 4}), batch_a(), batch_b()}, {}},
          {"aten::addbmm_", {numbers({5, 4}), batch_a(), batch_b()}, {}},
          {"aten::linear", {numbers({2, 5, 3}), numbers({4, 3}), numbers({4})}, {}},
          {"aten::linear", {numbers({5, 3}), numbers({4, 3})}, {}},
          {"aten::linear", {numbers({3}), numbers({4, 3})}, {}},
          {"aten::linear_backward",
           {numbers({2, 5, 3}), numbers({2, 5, 4}), numbers({4, 3}), bools({true, true, true})},
           {}},
          {"aten::linear_backward",
           {numbers({5, 3}), numbers({5, 4}), numbers({4, 3}), bools({true, false, true})},
           {}},
          {"aten::matmul", {numbers({2, 5, 3}), numbers({3, 4})}, {}},
          {"aten::matmul", {numbers({2, 1, 5, 3}), numbers({6, 3, 4})}, {}},
          {"aten::matmul", {numbers({3}), numbers({2, 3, 4})}, {}},
          {"aten::matmul", {numbers({5}), numbers({5})}, {}},
          {"aten::_grouped_mm", {in_float32({3, 5, 8}), in_float32({3, 8, 16})}, {}},
          {"aten::_grouped_mm", {in_float32({7, 8}), in_float32({3, 8, 16}), ends({2, 2, 7})}, {}},
          {"aten::_grouped_mm", {in_float32({3, 5, 8}), in_float32({8, 16}), ends({2, 2, 16})}, {}},
          {"aten::_grouped_mm", {in_float32({5, 8}), in_float32({8, 16}), ends({2, 3, 8})}, {}},
      },
      // They need another result dtype, which CPU kernels do not have.
      // _scaled_mm: below, because simulated ranks cannot join float8 tensors.
      {"aten::mm.dtype", "aten::bmm.dtype", "aten::addmm.dtype", "aten::baddbmm.dtype", "aten::_scaled_mm"});
}

TEST(MatmulRules, ShardedContractionGivesPartialSumAndPartialBias) {
  auto rule = rules::registry().find("aten::addmm")->fn(call_query({"aten::addmm", {numbers({4}), a(), b()}, {}}));
  auto summed = std::find_if(rule.strategies.begin(), rule.strategies.end(),
                             [](const auto& strategy) { return strategy.in[1] == Shard(1); });
  ASSERT_NE(summed, rule.strategies.end());
  EXPECT_EQ(summed->in[0], Partial());
  EXPECT_EQ(summed->in[2], Shard(0));
  EXPECT_EQ(summed->out[0], Partial());
  EXPECT_EQ(rule.flops, 5 * 3 * 4);
}

// The product of shards of scaled float8 matrices, for each way to shard one dim.
TEST(MatmulRules, ScaledProductsOfShards) {
  const auto x = numbers({5, 32}).sub(0.5).to(at::kFloat8_e4m3fn);
  const auto w = numbers({48, 32}).sub(0.4).to(at::kFloat8_e4m3fn).t();
  const c10::IValue none, bf16(static_cast<int64_t>(at::kBFloat16));
  const auto bias = numbers({48}).to(at::kBFloat16);
  const auto run = [&](const at::Tensor& a, const at::Tensor& b, const at::Tensor& scale_a, const at::Tensor& scale_b,
                       const c10::IValue& add) {
    torch::jit::Stack stack{a, b, scale_a, scale_b, add, none, bf16, false};
    find_op("tessera::_scaled_mm_local").callBoxed(stack);
    return stack[0].toTensor().to(at::kFloat);
  };
  const auto one = at::full({}, 0.5, at::kFloat);
  for (bool by_row : {false, TORCH_VERSION_MINOR >= 13}) {  // before, the CPU has no scales of rows
    const auto scale_a = by_row ? numbers({5, 1}).to(at::kFloat) : one,
               scale_b = by_row ? numbers({1, 48}).to(at::kFloat) : one;
    const auto rule = rules::registry()
                          .find("aten::_scaled_mm")
                          ->fn(call_query({"aten::_scaled_mm", {x, w, scale_a, scale_b, bias, none, bf16}, {}}));
    EXPECT_EQ(rule.strategies.size(), 4u);
    const auto full = run(x, w, scale_a, scale_b, bias);
    const auto rows = run(x.narrow(0, 3, 2), w, by_row ? scale_a.narrow(0, 3, 2) : scale_a, scale_b, bias);
    const auto columns =
        run(x, w.narrow(1, 7, 20), scale_a, by_row ? scale_b.narrow(1, 7, 20) : scale_b, bias.narrow(0, 7, 20));
    const auto sum = run(x.narrow(1, 0, 20), w.narrow(0, 0, 20), scale_a, scale_b, bias)
                         .add(run(x.narrow(1, 20, 12), w.narrow(0, 20, 12), scale_a, scale_b, none));
    EXPECT_TRUE(at::allclose(rows, full.narrow(0, 3, 2), 0.02, 0.02));
    EXPECT_TRUE(at::allclose(columns, full.narrow(1, 7, 20), 0.02, 0.02));
    EXPECT_TRUE(at::allclose(sum, full, 0.03, 0.05));
  }
  const auto float8 =
      rules::registry().find("aten::_scaled_mm")->fn(call_query({"aten::_scaled_mm", {x, w, one, one}, {}}));
  EXPECT_EQ(float8.strategies.size(), 3u) << "a sum of float8 results";
}

}  // namespace
}  // namespace tessera::testing
