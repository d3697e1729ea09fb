#include "tests/rules/family_test.h"

#include <ATen/ops/randn.h>

namespace tessera::testing {
namespace {

TEST(PointwiseRules, HoldByBruteForce) {
  const std::vector<std::string> into_out = {"aten::maximum.out", "aten::minimum.out"};
  auto samples = samples_of_all("pointwise", into_out);
  for (const auto& op : into_out)  // `out` has the sizes of the result
    samples.push_back({op, {at::randn({5, 3}), at::randn({3}), at::randn({5, 3})}, {}});
  expect_family_holds("pointwise", samples);
}

}  // namespace
}  // namespace tessera::testing
