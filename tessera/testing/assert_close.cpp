#include "tessera/testing/assert_close.h"

#include "tessera/base/error.h"

#include <ATen/ops/abs.h>
#include <ATen/ops/isclose.h>
#include <ATen/ops/nonzero.h>

namespace tessera::testing {
namespace {

struct DtypeTolerance {
  c10::ScalarType dtype;
  Tolerance tolerance;
};
constexpr DtypeTolerance kTolerances[] = {
    {c10::kHalf, {1e-3, 1e-5}},          {c10::kComplexHalf, {1e-3, 1e-5}},    {c10::kBFloat16, {1.6e-2, 1e-5}},
    {c10::kFloat, {1.3e-6, 1e-5}},       {c10::kComplexFloat, {1.3e-6, 1e-5}}, {c10::kDouble, {1e-7, 1e-7}},
    {c10::kComplexDouble, {1e-7, 1e-7}},
};

}  // namespace

Tolerance tolerance_of(c10::ScalarType dtype) {
  for (const auto& row : kTolerances)
    if (row.dtype == dtype) return row.tolerance;
  return {0, 0};  // integers and booleans are exact
}

std::string close(const at::Tensor& actual, const at::Tensor& expected, Tolerance tolerance) {
  if (!actual.defined() || !expected.defined())
    return actual.defined() == expected.defined() ? ""
           : actual.defined()                     ? "expected is undefined"
                                                  : "actual is undefined";
  if (actual.sizes() != expected.sizes()) return c10::str("shape ", actual.sizes(), ", expected ", expected.sizes());
  if (actual.scalar_type() != expected.scalar_type())
    return c10::str("dtype ", actual.scalar_type(), ", expected ", expected.scalar_type());
  const Tolerance by_dtype = tolerance_of(actual.scalar_type());
  if (tolerance.relative < 0) tolerance.relative = by_dtype.relative;
  if (tolerance.absolute < 0) tolerance.absolute = by_dtype.absolute;
  const at::Tensor a = actual.detach().cpu(), e = expected.detach().cpu();
  const at::Tensor good = at::isclose(a, e, tolerance.relative, tolerance.absolute, /*equal_nan=*/true);
  const int64_t bad = good.numel() - good.sum().item<int64_t>();
  if (bad == 0) return "";
  const at::Tensor where = at::nonzero(good.logical_not())[0];
  at::Tensor at_a = a, at_e = e;
  std::vector<int64_t> index;
  for (int64_t d = 0; d < a.dim(); d++) {
    index.push_back(where[d].item<int64_t>());
    at_a = at_a.select(0, index.back());
    at_e = at_e.select(0, index.back());
  }
  return c10::str(bad, " of ", a.numel(), " elements differ (tolerance ", tolerance.relative, " relative, ",
                  tolerance.absolute, " absolute), first at [", c10::Join(",", index), "]: ", at_a.item(),
                  ", expected ", at_e.item());
}

std::string close(const std::vector<at::Tensor>& actual, const std::vector<at::Tensor>& expected, Tolerance tolerance) {
  if (actual.size() != expected.size()) return c10::str(actual.size(), " tensors, expected ", expected.size());
  for (size_t i = 0; i < actual.size(); i++)
    if (auto message = close(actual[i], expected[i], tolerance); !message.empty())
      return c10::str("tensor ", i, ": ", message);
  return "";
}

void assert_close(const at::Tensor& actual, const at::Tensor& expected, Tolerance tolerance) {
  if (auto message = close(actual, expected, tolerance); !message.empty()) throw std::runtime_error(message);
}
void assert_close(const std::vector<at::Tensor>& actual, const std::vector<at::Tensor>& expected, Tolerance tolerance) {
  if (auto message = close(actual, expected, tolerance); !message.empty()) throw std::runtime_error(message);
}

}  // namespace tessera::testing
