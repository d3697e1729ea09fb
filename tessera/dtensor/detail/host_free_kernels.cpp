#include "tessera/dtensor/detail/dispatch.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/policy.h"
#include "tessera/tracing/detail/compiling_scope.h"

#include <ATen/TensorOperators.h>
#include <ATen/WrapDimUtils.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <limits>

// Ops whose LibTorch code, or the derivative of it, reads values on the host or makes tensors whose sizes depend on
// values. On DTensors that is a gather, and a compiled step cannot do it at all. This file replaces them at the
// autograd key by differentiable ops of fixed sizes, where the result is the same.
namespace tessera::detail {
namespace {

// LibTorch's own kernel with its derivative.
at::Tensor with_derivative_of_libtorch(const c10::OperatorHandle& op, torch::jit::Stack arguments) {
  op.callBoxedForDispatchKey(c10::DispatchKey::Autograd, arguments);
  return arguments[0].toTensor();
}

bool has_gradient(const at::Tensor& t) { return c10::GradMode::is_enabled() && t.requires_grad(); }

// The derivative of LibTorch selects the elements of the mask, then adds them.
at::Tensor masked_fill(const at::Tensor& self, const at::Tensor& mask, const at::Tensor& value) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::masked_fill", "Tensor");
  if (!has_gradient(value) || value.dim() > 0 || mask.scalar_type() != at::kBool)
    return with_derivative_of_libtorch(op, {self, mask, value});
  return at::where(mask, value.to(self.scalar_type()), self);
}

// The derivative of LibTorch asks for the unique indices.
at::Tensor fill_indices(const at::Tensor& self, int64_t dim, const at::Tensor& index, const at::Tensor& value) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::index_fill", "int_Tensor");
  if (!has_gradient(value) || value.dim() > 0 || !is_dtensor(index))
    return with_derivative_of_libtorch(op, {self, dim, index, value});
  const auto wrapped = at::maybe_wrap_dim(dim, self.dim());
  if (self.dim() == 0) return fill_indices(self.unsqueeze(0), 0, index, value).squeeze(0);
  const ImplicitReplication made_here;
  const auto filled = at::zeros({self.size(wrapped)}, index.options().dtype(at::kBool)).index_fill(0, index, true);
  std::vector<int64_t> sizes(static_cast<size_t>(self.dim()), 1);
  sizes[static_cast<size_t>(wrapped)] = self.size(wrapped);
  return at::where(filled.view(sizes), value.to(self.scalar_type()), self);
}

// narrow with a tensor as its start is a view, so it reads the start on the host. In a compiled step it is a copy.
at::Tensor narrow(const at::Tensor& self, int64_t dim, const at::Tensor& start, int64_t length) {
  TORCH_CHECK(start.dim() == 0 && c10::isIntegralType(start.scalar_type(), /*includeBool=*/false),
              "start must be an 0-dim integral Tensor.");
  const auto plain = [&] { return is_dtensor(start) ? DTensor(start).full_tensor() : start; };
  if (!compiling()) return self.narrow(dim, plain().item<int64_t>(), length);
  TORCH_CHECK(length >= 0, "narrow(): length must be non-negative.");
  const ImplicitReplication made_here;
  const auto first = at::where(start.lt(0), start + self.size(dim), start);
  return self.index_select(dim, first + at::arange(length, first.options()));
}

// cov with weights checks them on the host. A compiled step cannot: its result is NaN where the eager op raises.
at::Tensor weighted_cov(const at::Tensor& self, int64_t correction, const std::optional<at::Tensor>& fweights,
                        const std::optional<at::Tensor>& aweights) {
  auto in = self.dim() < 2 ? self.view({1, -1}) : self;
  at::Tensor weights, valid;
  for (const auto& each : {fweights, aweights}) {
    if (!each) continue;
    TORCH_CHECK(each->dim() <= 1 && each->numel() == in.size(1), "cov(): expected ", in.size(1),
                " weights in one dimension, found sizes ", each->sizes());
    const auto not_negative = each->min().ge(0);
    valid = valid.defined() ? valid.logical_and(not_negative) : not_negative;
    weights = weights.defined() ? weights * *each : *each;
  }
  const auto sum = weights.sum();
  const auto average = (in * weights).sum(1) / sum;
  const auto freedom =
      aweights && correction != 0 ? sum - correction * (weights * *aweights).sum() / sum : sum - correction;
  in = in - average.unsqueeze(1);
  const auto products = at::mm(in, (in * weights).t().conj());
  const auto result = products.true_divide(freedom.clamp_min(0)).squeeze();
  const ImplicitReplication made_here;
  const auto nan = at::scalar_tensor(std::numeric_limits<double>::quiet_NaN(), result.options());
  return at::where(valid.logical_and(sum.ne(0)), result, nan);
}

at::Tensor cov(const at::Tensor& self, int64_t correction, const std::optional<at::Tensor>& fweights,
               const std::optional<at::Tensor>& aweights) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::cov", "");
  const bool is_matrix = self.dim() <= 2 && self.scalar_type() != at::kBool;
  if (compiling() && (fweights || aweights) && is_matrix) return weighted_cov(self, correction, fweights, aweights);
  torch::jit::Stack stack{self, correction, fweights, aweights};
  op.callBoxedForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd, stack);
  return stack[0].toTensor();
}

// LibTorch's code scatters into plain zeros. Below autograd the op has a rule, without a derivative.
at::Tensor value_selecting_reduction_backward(const at::Tensor& grad, int64_t dim, const at::Tensor& indices,
                                              c10::SymIntArrayRef sizes, bool keepdim) {
  const auto ints = C10_AS_INTARRAYREF_SLOW(sizes);
  if (!has_gradient(grad)) {
    static const auto& entry = propagate::entry_of("aten::value_selecting_reduction_backward");
    torch::jit::Stack stack{grad, dim, indices, ints.vec(), keepdim};
    dispatch_boxed(entry, &stack);
    return stack[0].toTensor();
  }
  const ImplicitReplication made_here;
  const auto zeros = at::zeros(ints, grad.options());
  if (keepdim || ints.empty()) return zeros.scatter(dim, indices, grad);
  return zeros.scatter(dim, indices.unsqueeze(dim), grad.unsqueeze(dim));
}

}  // namespace

void register_host_free_kernels(torch::Library& aten, torch::Library& aten_autograd) {
  aten_autograd.impl("masked_fill.Tensor", TORCH_FN(masked_fill));
  aten_autograd.impl("index_fill.int_Tensor", TORCH_FN(fill_indices));
  aten_autograd.impl("value_selecting_reduction_backward", TORCH_FN(value_selecting_reduction_backward));
  for (auto* library : {&aten, &aten_autograd}) {  // composite ops: inference mode skips the autograd key
    library->impl("narrow.Tensor", TORCH_FN(narrow));
    library->impl("cov", TORCH_FN(cov));
  }
}

}  // namespace tessera::detail
