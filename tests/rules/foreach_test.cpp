#include "tests/rules/family_test.h"

#include <ATen/ops/scalar_tensor.h>

namespace tessera::testing {
namespace {

c10::IValue list(std::vector<at::Tensor> tensors) { return c10::List<at::Tensor>(tensors); }

// Samples that cannot be generated: a tensor with one value for all, or one value per list element; two lists of
// different dtypes.
std::vector<Sample> by_hand() {
  auto x = list({numbers({5, 3}), numbers({4})}), y = list({numbers({5, 3}).mul(0.5), numbers({4}).mul(0.3)});
  auto one = at::scalar_tensor(0.5, at::kDouble), each = numbers({2});
  std::vector<Sample> samples;
  for (const std::string in_place : {"", "_"}) {
    samples.push_back({"aten::_foreach_add" + in_place + ".Tensor", {x, one}, {}});
    samples.push_back({"aten::_foreach_mul" + in_place + ".Tensor", {x, one}, {}});
    samples.push_back({"aten::_foreach_div" + in_place + ".Tensor", {x, one}, {1}});
    samples.push_back({"aten::_foreach_addcmul" + in_place + ".Tensor", {x, y, y, each}, {}});
    samples.push_back({"aten::_foreach_addcdiv" + in_place + ".Tensor", {x, y, y, each}, {}});
  }
  for (double p : {2.0, 1.0, 0.0, std::numeric_limits<double>::infinity()})
    samples.push_back({"aten::_foreach_norm.Scalar", {x, p}, {}});
  samples.push_back({"aten::_foreach_powsum.Scalar", {x, 3.0}, {}});
  samples.push_back({"aten::_amp_foreach_non_finite_check_and_unscale_",
                     {list({numbers({5, 3}).to(at::kFloat), numbers({4}).to(at::kFloat).div(0)}),
                      at::scalar_tensor(0.0, at::kFloat), at::scalar_tensor(0.5, at::kFloat)},
                     {}});
  auto steps = list({at::scalar_tensor(3.0, at::kFloat), at::scalar_tensor(2.0, at::kFloat)});
  auto lr = at::scalar_tensor(0.1, at::kDouble);
  auto none = list({});
  for (const std::string kind : {"adam", "adamw"})
    for (bool amsgrad : {false, true}) {
      auto largest = amsgrad ? y : none;
      samples.push_back(
          {"aten::_fused_" + kind + "_", {x, y, y, y, largest, steps, 0.1, 0.9, 0.99, 0.01, 1e-8, amsgrad, false}, {}});
      samples.push_back({"aten::_fused_" + kind + "_.tensor_lr",
                         {x, y, y, y, largest, steps, lr, 0.9, 0.99, 0.01, 1e-8, amsgrad, false},
                         {}});
    }
  samples.push_back({"aten::_fused_sgd_", {x, y, y, 0.01, 0.9, 0.1, 0.0, true, false, false}, {}});
  samples.push_back({"aten::_fused_sgd_", {x, y, none, 0.01, 0.0, 0.1, 0.0, false, false, true}, {}});
  samples.push_back({"aten::_fused_sgd_.tensor_lr", {x, y, y, 0.01, 0.9, lr, 0.0, true, false, false}, {}});
  samples.push_back({"aten::_fused_adagrad_", {x, y, y, steps, 0.1, 0.01, 0.0, 1e-8, false}, {}});
  samples.push_back({"aten::_fused_adagrad_.tensor_lr", {x, y, y, steps, lr, 0.01, 0.0, 1e-8, false}, {}});
  return samples;
}

TEST(ForeachRules, HoldByBruteForce) {
  auto samples = by_hand();
  std::vector<std::string> done;
  for (const auto& sample : samples) done.push_back(sample.op);
  for (auto& sample : samples_of_all("foreach", done)) samples.push_back(std::move(sample));
  expect_family_holds("foreach", samples);
}

}  // namespace
}  // namespace tessera::testing
