#include "tests/rules/family_test.h"

namespace tessera::testing {
namespace {

const auto a = [] { return numbers({5, 3}); };
const auto b = [] { return numbers({3, 4}); };
const auto batch_a = [] { return numbers({2, 5, 3}); };
const auto batch_b = [] { return numbers({2, 3, 4}); };

TEST(MatmulRules, HoldByBruteForce) {
  expect_family_holds("matmul",
                      {
                          {"aten::_foreach_mm",
                           {c10::List<at::Tensor>({numbers({5, 3}), numbers({4, 2})}),
                            c10::List<at::Tensor>({numbers({3, 4}), numbers({2, 5})})},
                           {}},
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
                      },
                      // They need another result dtype, which CPU kernels do not have.
                      {"aten::mm.dtype", "aten::bmm.dtype", "aten::addmm.dtype", "aten::baddbmm.dtype"});
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

}  // namespace
}  // namespace tessera::testing
