#include <ATen/core/Tensor.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/mm.h>
#include <torch/library.h>

#include <array>
#include <tuple>
#include <vector>

// The gradients of linear, for a batch of any number of dims. ATen has this schema without a kernel for CPU or CUDA.
namespace tessera {
namespace {

//   input (..., k)   grad (..., n)   weight (n, k)
std::tuple<at::Tensor, at::Tensor, at::Tensor> linear_backward(const at::Tensor& input, const at::Tensor& grad,
                                                               const at::Tensor& weight, std::array<bool, 3> mask) {
  auto rows = grad.numel() / std::max<int64_t>(weight.size(0), 1);
  if (weight.size(0) == 0) rows = input.numel() / std::max<int64_t>(weight.size(1), 1);
  auto flat_grad = grad.reshape({rows, weight.size(0)});
  at::Tensor grad_input, grad_weight, grad_bias;
  if (mask[0]) grad_input = at::mm(flat_grad, weight).reshape(input.sizes());
  if (mask[1]) grad_weight = at::mm(flat_grad.t(), input.reshape({rows, weight.size(1)}));
  if (mask[2]) grad_bias = flat_grad.sum(0);
  return {grad_input, grad_weight, grad_bias};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(tessera, m) {
  m.def(
      "linear_backward(Tensor self, Tensor grad_output, Tensor weight, bool[3] output_mask) -> (Tensor, Tensor, "
      "Tensor)");
}

TORCH_LIBRARY_IMPL(tessera, CompositeExplicitAutograd, m) { m.impl("linear_backward", linear_backward); }

}  // namespace tessera
