#include "tests/rules/family_test.h"

#include <ATen/ops/native_batch_norm.h>
#include <ATen/ops/native_group_norm.h>
#include <ATen/ops/native_layer_norm.h>

namespace tessera::testing {
namespace {

TEST(NormalizationRules, HoldByBruteForce) {
  auto x = numbers({2, 5, 3}), w = numbers({3}), b = numbers({3}).mul(0.5);
  auto shape = [](std::vector<int64_t> v) { return c10::IValue(std::move(v)); };
  c10::IValue none;
  auto [y, mean, rstd] = at::native_layer_norm(x, {3}, w, b, 1e-5);
  auto image = numbers({5, 4, 3, 2}), c = numbers({4}), d = numbers({4}).mul(0.5);
  auto [gy, gmean, grstd] = at::native_group_norm(image, c, d, 5, 4, 6, 2, 1e-5);
  auto [by, bmean, binv] = at::native_batch_norm(image, c, d, std::nullopt, std::nullopt, true, 0.1, 1e-5);
  auto empty = numbers({0}), rm = numbers({4}), rv = numbers({4}).add(0.5);
  auto all = bools({true, true, true});
  expect_family_holds(
      "normalization",
      {
          {"aten::native_layer_norm", {x, shape({3}), w, b, 1e-5}, {}},
          {"aten::native_layer_norm", {x, shape({5, 3}), none, none, 1e-5}, {}},
          {"aten::native_layer_norm_backward", {y, x, shape({3}), mean, rstd, w, b, all}, {}},
          {"aten::native_layer_norm_backward", {y, x, shape({3}), mean, rstd, w, b, bools({true, false, true})}, {}},
          {"aten::_fused_rms_norm", {x, shape({3}), w, 1e-5}, {}},
          {"aten::_fused_rms_norm", {x, shape({3}), none, none}, {}},
          {"aten::native_group_norm", {image, c, d, 5, 4, 6, 2, 1e-5}, {}},
          {"aten::native_group_norm_backward", {gy, image, gmean, grstd, c, 5, 4, 6, 2, all}, {}},
          {"aten::native_batch_norm", {image, c, d, rm, rv, true, 0.1, 1e-5}, {}},
          {"aten::native_batch_norm", {image, c, d, rm, rv, false, 0.1, 1e-5}, {}},
          {"aten::native_batch_norm", {image, none, none, none, none, true, 0.1, 1e-5}, {}},
          {"aten::native_layer_norm", {numbers({3, 5}).t(), shape({3}), w, b, 1e-5}, {}},
          {"aten::native_batch_norm",
           {image.contiguous(at::MemoryFormat::ChannelsLast), c, d, rm, rv, true, 0.1, 1e-5},
           {}},
          {"aten::native_batch_norm_backward",
           {by, image.contiguous(at::MemoryFormat::ChannelsLast), c, rm, rv, bmean, binv, true, 1e-5, all},
           {}},
          {"aten::native_group_norm", {image.contiguous(at::MemoryFormat::ChannelsLast), c, d, 5, 4, 6, 2, 1e-5}, {}},
          {"aten::_native_batch_norm_legit", {image, c, d, rm, rv, true, 0.1, 1e-5}, {}},
          {"aten::_native_batch_norm_legit.no_stats", {image, c, d, true, 0.1, 1e-5}, {}},
          {"aten::native_batch_norm_backward", {by, image, c, rm, rv, bmean, binv, true, 1e-5, all}, {}},
          {"aten::native_batch_norm_backward", {by, image, c, rm, rv, empty, empty, false, 1e-5, all}, {}},
      },
      {"aten::_fused_rms_norm_backward"});  // no CPU kernel; its strategies are those of native_layer_norm_backward
}

}  // namespace
}  // namespace tessera::testing
