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
  expect_family_holds("attention", samples);
}

}  // namespace
}  // namespace tessera::testing
