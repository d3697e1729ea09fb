#include "tests/rules/family_test.h"

#include <c10/core/MemoryFormat.h>

namespace tessera::testing {
namespace {

TEST(CopyRules, HoldByBruteForce) {
  auto x = numbers({5, 3}), t = numbers({3, 5}).t(), image = numbers({2, 3, 4, 5});
  auto type = [](c10::ScalarType s) { return c10::IValue(static_cast<int64_t>(s)); };
  auto format = [](c10::MemoryFormat f) { return c10::IValue(static_cast<int64_t>(f)); };
  c10::IValue none;
  expect_family_holds("copy", {
                                  {"aten::clone", {x}, {}},
                                  {"aten::clone", {t}, {}},
                                  {"aten::clone", {t, format(c10::MemoryFormat::Contiguous)}, {}},
                                  {"aten::clone", {image, format(c10::MemoryFormat::ChannelsLast)}, {}},
                                  {"aten::clone", {numbers({5, 1}).expand({5, 3})}, {}},
                                  {"aten::_to_copy", {t, type(at::kFloat)}, {}},
                                  {"aten::_to_copy", {x.mul(9), type(at::kLong)}, {}},
                                  {"aten::_to_copy", {integers({5, 3}), type(at::kInt)}, {}},
                                  {"aten::_to_copy", {numbers({5, 4}).t().slice(0, 0, 4, 2)}, {}},
                                  {"aten::_conj_physical", {x}, {}},
                                  {"aten::lift", {x}, {}},
                                  {"aten::lift_fresh_copy", {t}, {}},
                                  {"aten::copy", {x, x.mul(2)}, {}},
                                  {"aten::copy_", {x, x.mul(2)}, {}},
                                  {"aten::copy_", {x, numbers({3})}, {}},
                                  {"aten::copy_", {integers({5, 3}), x.mul(9)}, {}},
                                  {"aten::zero", {x}, {}},
                                  {"aten::zero_", {t}, {}},
                                  {"aten::fill.Scalar", {x, 2.5}, {}},
                                  {"aten::fill_.Scalar", {x, 2.5}, {}},
                                  {"aten::fill.Tensor", {x, numbers({})}, {}},
                                  {"aten::fill_.Tensor", {x, numbers({})}, {}},
                                  {"aten::fill_.Tensor", {x, numbers({})}, {1}},
                              });
}

}  // namespace
}  // namespace tessera::testing
