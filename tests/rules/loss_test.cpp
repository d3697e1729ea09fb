#include "tests/rules/family_test.h"

#include <ATen/ops/scalar_tensor.h>

namespace tessera::testing {
namespace {

// Reductions: 0 none, 1 mean, 2 sum. Sizes that do not divide: a mean of means would be wrong.
TEST(LossRules, HoldByBruteForce) {
  auto x = numbers({5, 3}), y = numbers({5, 3}).mul(0.5), w = numbers({3});
  auto scores = numbers({5, 4}).log(), target = integers({5}, 4), classes = numbers({4});
  auto image = numbers({2, 4, 3, 5}).log(), labels = integers({2, 3, 5}, 4);
  auto some_ignored = target.clone();
  some_ignored[1] = -100;
  c10::IValue none;
  std::vector<Sample> samples;
  for (int64_t reduction : {0, 1, 2}) {
    auto grad = reduction == 0 ? numbers({5, 3}) : numbers({});
    samples.insert(samples.end(), {
                                      {"aten::mse_loss", {x, y, reduction}, {}},
                                      {"aten::smooth_l1_loss", {x, y, reduction, 0.3}, {}},
                                      {"aten::huber_loss", {x, y, reduction, 0.3}, {}},
                                      {"aten::soft_margin_loss", {x, y, reduction}, {}},
                                      {"aten::binary_cross_entropy", {x, y, none, reduction}, {}},
                                      {"aten::binary_cross_entropy", {x, y, w, reduction}, {}},
                                      {"aten::binary_cross_entropy_with_logits", {x, y, none, w, reduction}, {}},
                                      {"aten::mse_loss_backward", {grad, x, y, reduction}, {}},
                                      {"aten::smooth_l1_loss_backward", {grad, x, y, reduction, 0.3}, {}},
                                      {"aten::huber_loss_backward", {grad, x, y, reduction, 0.3}, {}},
                                      {"aten::soft_margin_loss_backward", {grad, x, y, reduction}, {}},
                                      {"aten::binary_cross_entropy_backward", {grad, x, y, none, reduction}, {}},
                                      {"aten::nll_loss_forward", {scores, some_ignored, classes, reduction, -100}, {}},
                                      {"aten::nll_loss_forward", {scores[0], target[0], none, reduction, -100}, {}},
                                      {"aten::nll_loss2d_forward", {image, labels, none, reduction, 2}, {}},
                                  });
    auto total = at::scalar_tensor(3.5, at::kDouble);
    samples.push_back(
        {"aten::nll_loss_backward",
         {reduction == 0 ? numbers({5}) : numbers({}), scores, some_ignored, classes, reduction, -100, total},
         {}});
    samples.push_back({"aten::nll_loss2d_backward",
                       {reduction == 0 ? numbers({2, 3, 5}) : numbers({}), image, labels, none, reduction, 2, total},
                       {}});
  }
  expect_family_holds("loss", samples);
}

}  // namespace
}  // namespace tessera::testing
