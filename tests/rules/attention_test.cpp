#include "tests/rules/family_test.h"

#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>

namespace tessera::testing {
namespace {

TEST(AttentionRules, HoldByBruteForce) {
  auto q = numbers({3, 2, 5, 4}), k = numbers({3, 2, 6, 4}).mul(0.7), v = numbers({3, 2, 6, 4}).mul(0.4);
  auto mask = numbers({5, 6}), wide = numbers({3, 1, 5, 6});
  c10::IValue none;
  std::vector<Sample> samples;
  const std::string forward = "aten::_scaled_dot_product_flash_attention_for_cpu", backward = forward + "_backward";
  for (bool causal : {false, true}) {
    samples.push_back({forward, {q, k, v, 0.0, causal}, {}});
    auto [out, lse] = at::_scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal);
    samples.push_back({backward, {out.mul(0.5), q, k, v, out, lse, 0.0, causal}, {}});
  }
  for (const auto& m : {mask, wide}) {
    samples.push_back({forward, {q, k, v, 0.0, false, m, none}, {}});
    auto [out, lse] = at::_scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, false, m);
    samples.push_back({backward, {out.mul(0.5), q, k, v, out, lse, 0.0, false, m, none}, {}});
  }
  // These kernels need a GPU: their rules are tested below.
  expect_family_holds(
      "attention", samples,
      {"aten::_scaled_dot_product_cudnn_attention", "aten::_scaled_dot_product_cudnn_attention_backward",
       "aten::_scaled_dot_product_efficient_attention", "aten::_scaled_dot_product_efficient_attention_backward",
       "aten::_scaled_dot_product_flash_attention", "aten::_scaled_dot_product_flash_attention_backward"});
}

// The call of a CUDA op with tensors on the CPU, which its kernel does not accept.
struct CudaAttention {
  std::string op;
  std::vector<c10::IValue> args;
  size_t sharded_outs;
};

std::vector<CudaAttention> cuda_attention() {
  const auto q = numbers({3, 2, 5, 4}), k = numbers({3, 2, 6, 4}), lse = numbers({3, 2, 5}),
             bias = numbers({3, 1, 5, 6});
  const auto seed = integers({}), none = at::Tensor();
  const std::string name = "aten::_scaled_dot_product_";
  return {
      {name + "flash_attention", {q, k, k}, 2},
      {name + "flash_attention_backward", {q, q, k, k, q, lse, none, none, 5, 6, 0.0, false, seed, seed}, 3},
      {name + "efficient_attention", {q, k, k, bias, true}, 2},
      {name + "efficient_attention_backward",
       {q, q, k, k, bias, q, lse, seed, seed, 0.0, bools({true, true, true, true})},
       3},
      {name + "cudnn_attention", {q, k, k, c10::IValue(), true}, 2},
      {name + "cudnn_attention_backward", {q, q, k, k, q, lse, seed, seed, none, none, none, 5, 6, 0.0, false}, 3},
  };
}

TEST(AttentionRules, CudaKernelsShardBatchAndHeads) {
  for (const auto& call : cuda_attention()) {
    const auto rule = rules::registry().find(call.op)->fn(call_query({call.op, call.args, {}}));
    ASSERT_EQ(rule.strategies.size(), 3u) << call.op;
    for (int64_t d : {0, 1}) {
      const auto& strategy = rule.strategies[static_cast<size_t>(d) + 1];
      EXPECT_EQ(strategy.in[0], Shard(d)) << call.op;
      for (size_t i = 0; i < call.sharded_outs; i++) EXPECT_EQ(strategy.out[i], Shard(d)) << call.op;
    }
  }
}

// A bias without a dim for heads gets a sum over the shards of heads.
TEST(AttentionRules, GradientOfABroadcastBiasIsPartial) {
  const auto call = cuda_attention()[3];
  const auto rule = rules::registry().find(call.op)->fn(call_query({call.op, call.args, {}}));
  EXPECT_EQ(rule.strategies[1].out[3], Shard(0));
  EXPECT_EQ(rule.strategies[2].out[3], Partial());
}

TEST(AttentionRules, DebugMaskIsGathered) {
  const auto q = numbers({3, 2, 5, 4});
  const std::string op = "aten::_scaled_dot_product_flash_attention";
  EXPECT_TRUE(rules::registry().find(op)->fn(call_query({op, {q, q, q, 0.0, false, true}, {}})).gathered);
}

// Ranks without heads do not call the kernel.
TEST(AttentionRules, EmptyShardsGiveResultsWithoutElements) {
  for (auto call : cuda_attention()) {
    const auto rule = rules::registry().find(call.op)->fn(call_query({call.op, call.args, {}}));
    torch::jit::Stack stack;
    const auto& arguments = find_op(call.op).schema().arguments();
    for (size_t i = 0; i < arguments.size(); i++) {
      stack.push_back(i < call.args.size() ? call.args[i] : *arguments[i].default_value());
      if (stack.back().isTensor() && stack.back().toTensor().defined() && stack.back().toTensor().dim() > 2)
        stack.back() = stack.back().toTensor().narrow(0, 0, 0);
    }
    for (const auto& out : rule.outs) {
      std::vector<int64_t> sizes(out.sizes.begin(), out.sizes.end());
      if (sizes.size() > 2) sizes[0] = 0;
      stack.emplace_back(sizes);
    }
    find_op(rule.special).callBoxed(stack);
    EXPECT_EQ(stack.size(), find_op(call.op).schema().returns().size()) << call.op;
    EXPECT_EQ(stack[0].toTensor().size(0), 0) << call.op;
  }
}

}  // namespace
}  // namespace tessera::testing
