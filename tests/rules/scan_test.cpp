#include "tests/rules/family_test.h"

namespace tessera::testing {
namespace {

TEST(ScanRules, HoldByBruteForce) {
  auto x = numbers({5, 3}), y = numbers({2, 5, 4}), t = numbers({3, 5}).t();
  auto type = c10::IValue(static_cast<int64_t>(at::kDouble));
  expect_family_holds("scan", {
                                  {"aten::_softmax", {x, 1, false}, {}},
                                  {"aten::_softmax", {y, 0, false}, {}},
                                  {"aten::_log_softmax", {x, -1, false}, {}},
                                  {"aten::_softmax_backward_data", {x, x.softmax(1), 1, type}, {}},
                                  {"aten::_log_softmax_backward_data", {x, x.log_softmax(0), 0, type}, {}},
                                  {"aten::cumsum", {y, 1}, {}},
                                  {"aten::_softmax", {t, 1, false}, {}},
                                  {"aten::_log_softmax", {t, 0, false}, {}},
                                  {"aten::_softmax_backward_data", {t, t.softmax(1), 1, type}, {}},
                                  {"aten::cumprod", {t, 0}, {}},
                                  {"aten::sort", {t, 1, true}, {}},
                                  {"aten::sort", {t, 0, true}, {}},
                                  {"aten::topk", {t, 2, 1}, {}},
                                  {"aten::topk", {t, 2, 0}, {}},
                                  {"aten::glu", {numbers({4, 5}).t(), 1}, {}},
                                  {"aten::glu_backward", {numbers({5, 2}), numbers({4, 5}).t(), 1}, {}},
                                  {"aten::cumsum", {t, 1}, {}},
                                  {"aten::cumprod", {x, 0}, {}},
                                  {"aten::sort", {x, 1, true}, {}},
                                  {"aten::sort.stable", {x, true, 0, false}, {}},
                                  {"aten::topk", {y, 2, 1}, {}},
                                  {"aten::glu", {y, 2}, {}},
                                  {"aten::cumsum_", {y.clone(), 1}, {}},
                                  {"aten::cumprod_", {y.clone(), 1}, {}},
                                  {"aten::logcumsumexp", {y, 1}, {}},
                                  {"aten::_logcumsumexp", {y, 1}, {}},
                                  {"aten::cummax", {y, 1}, {}},
                                  {"aten::cummin", {t, 0}, {}},
                                  {"aten::renorm", {y, 2.0, 1, 0.5}, {}},
                                  {"aten::renorm_", {y.clone(), 2.0, 1, 0.5}, {}},
                                  {"aten::linalg_cross", {numbers({5, 3}), numbers({5, 3}).mul(0.5), 1}, {}},
                                  {"aten::linalg_cross", {numbers({2, 5, 3}), numbers({1, 5, 3}), -1}, {}},
                                  {"aten::glu_backward", {numbers({2, 5, 2}), y, 2}, {}},
                              });
}

}  // namespace
}  // namespace tessera::testing
