#include <ATen/core/Tensor.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include <array>
#include <numeric>
#include <tuple>
#include <vector>

// Convolution on local tensors that may have no channels. ATen rejects these, or returns wrong sizes
// (rules/convolution.cpp).
namespace tessera {
namespace {

using Ints = at::IntArrayRef;
using OptionalTensor = std::optional<at::Tensor>;

// A sum over no input channels is zero; the bias is still added.
at::Tensor convolution_local(const at::Tensor& input, const at::Tensor& weight, const OptionalTensor& bias, Ints stride,
                             Ints padding, Ints dilation, bool transposed, Ints output_padding, int64_t groups,
                             Ints out) {
  if (input.numel() > 0 && weight.numel() > 0)
    return at::convolution(input, weight, bias, stride, padding, dilation, transposed, output_padding, groups);
  auto result = at::zeros(out, input.options());
  if (bias && bias->defined()) {
    std::vector<int64_t> by_channel(out.size(), 1);
    by_channel[1] = bias->size(0);
    result.add_(bias->view(by_channel));
  }
  return result;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward_local(
    const at::Tensor& grad, const at::Tensor& input, const at::Tensor& weight, at::OptionalIntArrayRef bias_sizes,
    Ints stride, Ints padding, Ints dilation, bool transposed, Ints output_padding, int64_t groups,
    std::array<bool, 3> mask) {
  if (grad.numel() > 0 && input.numel() > 0 && weight.numel() > 0)
    return at::convolution_backward(grad, input, weight, bias_sizes, stride, padding, dilation, transposed,
                                    output_padding, groups, mask);
  at::Tensor grad_input, grad_weight, grad_bias;
  if (mask[0]) grad_input = at::zeros_like(input);
  if (mask[1]) grad_weight = at::zeros_like(weight);
  if (mask[2]) {
    std::vector<int64_t> all_but_channels(static_cast<size_t>(grad.dim() - 1));
    std::iota(all_but_channels.begin(), all_but_channels.end(), 1);
    all_but_channels[0] = 0;
    grad_bias = grad.sum(all_but_channels);
  }
  return {grad_input, grad_weight, grad_bias};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(tessera, m) {
  m.def(
      "convolution_local(Tensor input, Tensor weight, Tensor? bias, int[] stride, int[] padding, int[] dilation, "
      "bool transposed, int[] output_padding, int groups, int[] out) -> Tensor");
  m.def(
      "convolution_backward_local(Tensor grad_output, Tensor input, Tensor weight, int[]? bias_sizes, int[] "
      "stride, "
      "int[] padding, int[] dilation, bool transposed, int[] output_padding, int groups, bool[3] output_mask) -> "
      "(Tensor, Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(tessera, CompositeExplicitAutograd, m) {
  m.impl("convolution_local", convolution_local);
  m.impl("convolution_backward_local", convolution_backward_local);
}

}  // namespace tessera
