#include "tessera/compile/detail/ir/constant_text.h"

#include "tessera/tracing/op_mode.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_strided.h>

#include <algorithm>
#include <cmath>

namespace tessera::compiler {
namespace {

constexpr int64_t kMostPrintedElements = 16;

}  // namespace

std::optional<std::vector<double>> elements_of(const at::Tensor& constant) {
  if (!constant.defined() || constant.numel() > kMostPrintedElements || constant.is_complex()) return {};
  const OpModesOff modes_off;
  const at::NoGradGuard no_grad;
  const auto as_double = constant.to(at::kCPU, at::kDouble).contiguous();
  std::vector<double> elements(as_double.const_data_ptr<double>(),
                               as_double.const_data_ptr<double>() + as_double.numel());
  if (c10::isIntegralType(constant.scalar_type(), true) &&
      std::any_of(elements.begin(), elements.end(), [](double e) { return std::abs(e) > kMostExactInteger; }))
    return {};
  return elements;
}

at::Tensor constant_of(const Type& type, const std::vector<double>& elements) {
  const OpModesOff modes_off;
  const at::NoGradGuard no_grad;
  auto as_double = at::empty_strided(type.sizes, Type::contiguous(at::kDouble, type.sizes).strides, at::kDouble);
  std::copy(elements.begin(), elements.end(), as_double.mutable_data_ptr<double>());
  auto constant = at::empty_strided(type.sizes, type.strides, at::TensorOptions(type.dtype).device(type.device));
  return constant.copy_(as_double);
}

}  // namespace tessera::compiler
