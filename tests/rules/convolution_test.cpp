#include "tests/rules/family_test.h"

#include <ATen/ops/max_pool2d_with_indices.h>

namespace tessera::testing {
namespace {

TEST(ConvolutionRules, HoldByBruteForce) {
  auto image = numbers({3, 2, 6, 5}), weight = numbers({4, 2, 3, 2}), bias = numbers({4}),
       turned = numbers({2, 4, 3, 2});
  auto ints = [](std::vector<int64_t> v) { return c10::IValue(std::move(v)); };
  auto inside_out = image.contiguous(at::MemoryFormat::ChannelsLast);
  auto one = ints({1, 1}), zero = ints({0, 0}), two = ints({2, 2});
  auto all = bools({true, true, true});
  c10::IValue none;
  auto [pooled, indices] = at::max_pool2d_with_indices(image, {2, 2});
  expect_family_holds(
      "convolution",
      {
          {"aten::convolution", {image, weight, bias, one, one, one, false, zero, 1}, {}},
          {"aten::convolution", {image, weight, none, two, zero, one, false, zero, 1}, {}},
          {"aten::convolution", {image, turned, bias, two, zero, one, true, one, 1}, {}},
          {"aten::convolution", {numbers({3, 4, 6, 5}), weight, bias, one, one, one, false, zero, 2}, {}},
          {"aten::convolution",
           {numbers({3, 2, 7}), numbers({4, 2, 3}), bias, ints({1}), ints({1}), ints({1}), false, ints({0}), 1},
           {}},
          {"aten::convolution_backward",
           {numbers({3, 4, 6, 6}), image, weight, ints({4}), one, one, one, false, zero, 1, all},
           {}},
          {"aten::convolution_backward",
           {numbers({3, 4, 6, 6}), image, weight, none, one, one, one, false, zero, 1, bools({true, true, false})},
           {}},
          {"aten::convolution_backward",
           {numbers({3, 4, 14, 11}), image, turned, ints({4}), two, zero, one, true, one, 1, all},
           {}},
          {"aten::max_pool2d_with_indices", {image, ints({2, 2})}, {}},
          {"aten::max_pool2d_with_indices", {image, ints({3, 2}), two, one, one, true}, {}},
          {"aten::max_pool2d_with_indices", {numbers({3, 6, 5}), ints({2, 2})}, {}},
          {"aten::max_pool2d_with_indices_backward", {pooled, image, ints({2, 2}), two, zero, one, false, indices}, {}},
          {"aten::avg_pool2d", {image, ints({2, 2})}, {}},
          {"aten::convolution", {inside_out, weight, bias, one, one, one, false, zero, 1}, {}},
          {"aten::convolution_backward",
           {numbers({3, 4, 6, 6}), inside_out, weight, ints({4}), one, one, one, false, zero, 1, all},
           {}},
          {"aten::max_pool2d_with_indices", {inside_out, ints({2, 2})}, {}},
          {"aten::max_pool2d_with_indices_backward",
           {pooled, inside_out, ints({2, 2}), two, zero, one, false, indices},
           {}},
          {"aten::avg_pool2d", {inside_out, ints({2, 2})}, {}},
          {"aten::_adaptive_avg_pool2d", {inside_out, ints({2, 3})}, {}},
          {"aten::_adaptive_avg_pool2d_backward", {numbers({3, 2, 2, 3}), inside_out}, {}},
          {"aten::avg_pool2d_backward", {numbers({3, 2, 3, 2}), image, two, two, zero, false, true, none}, {}},
          {"aten::_adaptive_avg_pool2d", {image, ints({2, 3})}, {}},
          {"aten::_adaptive_avg_pool2d_backward", {numbers({3, 2, 2, 3}), image}, {}},
      });
}

}  // namespace
}  // namespace tessera::testing
