#include <ATen/core/Reduction.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/binary_cross_entropy.h>
#include <ATen/ops/binary_cross_entropy_backward.h>
#include <ATen/ops/binary_cross_entropy_with_logits.h>
#include <ATen/ops/huber_loss.h>
#include <ATen/ops/huber_loss_backward.h>
#include <ATen/ops/mse_loss.h>
#include <ATen/ops/mse_loss_backward.h>
#include <ATen/ops/nll_loss2d_forward.h>
#include <ATen/ops/nll_loss_forward.h>
#include <ATen/ops/smooth_l1_loss.h>
#include <ATen/ops/smooth_l1_loss_backward.h>
#include <ATen/ops/soft_margin_loss.h>
#include <ATen/ops/soft_margin_loss_backward.h>
#include <torch/library.h>

#include <tuple>

// Losses with reduction mean on local tensors (rules/loss.cpp): the local sum divided by `count`, the number of
// elements of the global tensor. tessera::NAME_of takes the arguments of aten::NAME and the count.
namespace tessera {
namespace {

using at::Tensor;
using Optional = std::optional<Tensor>;
constexpr int64_t kSum = at::Reduction::Sum;

Tensor mse_loss_of(const Tensor& self, const Tensor& target, int64_t, double count) {
  return at::mse_loss(self, target, kSum).div_(count);
}
Tensor smooth_l1_loss_of(const Tensor& self, const Tensor& target, int64_t, double beta, double count) {
  return at::smooth_l1_loss(self, target, kSum, beta).div_(count);
}
Tensor huber_loss_of(const Tensor& self, const Tensor& target, int64_t, double delta, double count) {
  return at::huber_loss(self, target, kSum, delta).div_(count);
}
Tensor soft_margin_loss_of(const Tensor& self, const Tensor& target, int64_t, double count) {
  return at::soft_margin_loss(self, target, kSum).div_(count);
}
Tensor binary_cross_entropy_of(const Tensor& self, const Tensor& target, const Optional& weight, int64_t,
                               double count) {
  return at::binary_cross_entropy(self, target, weight, kSum).div_(count);
}
Tensor binary_cross_entropy_with_logits_of(const Tensor& self, const Tensor& target, const Optional& weight,
                                           const Optional& pos_weight, int64_t, double count) {
  return at::binary_cross_entropy_with_logits(self, target, weight, pos_weight, kSum).div_(count);
}

Tensor mse_loss_backward_of(const Tensor& grad, const Tensor& self, const Tensor& target, int64_t, double count) {
  return at::mse_loss_backward(grad, self, target, kSum).div_(count);
}
Tensor smooth_l1_loss_backward_of(const Tensor& grad, const Tensor& self, const Tensor& target, int64_t, double beta,
                                  double count) {
  return at::smooth_l1_loss_backward(grad, self, target, kSum, beta).div_(count);
}
Tensor huber_loss_backward_of(const Tensor& grad, const Tensor& self, const Tensor& target, int64_t, double delta,
                              double count) {
  return at::huber_loss_backward(grad, self, target, kSum, delta).div_(count);
}
Tensor soft_margin_loss_backward_of(const Tensor& grad, const Tensor& self, const Tensor& target, int64_t,
                                    double count) {
  return at::soft_margin_loss_backward(grad, self, target, kSum).div_(count);
}
Tensor binary_cross_entropy_backward_of(const Tensor& grad, const Tensor& self, const Tensor& target,
                                        const Optional& weight, int64_t, double count) {
  return at::binary_cross_entropy_backward(grad, self, target, weight, kSum).div_(count);
}

// The denominator of nll_loss depends on the data. These two ops run on the DTensors: the sum, the denominator, and the
// division. The division's rule all-reduces the denominator first.
std::tuple<Tensor, Tensor> nll_loss_mean(const Tensor& self, const Tensor& target, const Optional& weight, int64_t,
                                         int64_t ignore_index) {
  auto [sum, total_weight] = at::nll_loss_forward(self, target, weight, kSum, ignore_index);
  return {sum.div(total_weight), total_weight};
}
std::tuple<Tensor, Tensor> nll_loss2d_mean(const Tensor& self, const Tensor& target, const Optional& weight, int64_t,
                                           int64_t ignore_index) {
  auto [sum, total_weight] = at::nll_loss2d_forward(self, target, weight, kSum, ignore_index);
  return {sum.div(total_weight), total_weight};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(tessera, m) {
  m.def("mse_loss_of(Tensor self, Tensor target, int reduction, float count) -> Tensor");
  m.def("smooth_l1_loss_of(Tensor self, Tensor target, int reduction, float beta, float count) -> Tensor");
  m.def("huber_loss_of(Tensor self, Tensor target, int reduction, float delta, float count) -> Tensor");
  m.def("soft_margin_loss_of(Tensor self, Tensor target, int reduction, float count) -> Tensor");
  m.def("binary_cross_entropy_of(Tensor self, Tensor target, Tensor? weight, int reduction, float count) -> Tensor");
  m.def(
      "binary_cross_entropy_with_logits_of(Tensor self, Tensor target, Tensor? weight, Tensor? pos_weight, int "
      "reduction, float count) -> Tensor");
  m.def("mse_loss_backward_of(Tensor grad_output, Tensor self, Tensor target, int reduction, float count) -> Tensor");
  m.def(
      "smooth_l1_loss_backward_of(Tensor grad_output, Tensor self, Tensor target, int reduction, float beta, float "
      "count) -> Tensor");
  m.def(
      "huber_loss_backward_of(Tensor grad_output, Tensor self, Tensor target, int reduction, float delta, float count) "
      "-> Tensor");
  m.def(
      "soft_margin_loss_backward_of(Tensor grad_output, Tensor self, Tensor target, int reduction, float count) -> "
      "Tensor");
  m.def(
      "binary_cross_entropy_backward_of(Tensor grad_output, Tensor self, Tensor target, Tensor? weight, int reduction, "
      "float count) -> Tensor");
  m.def(
      "nll_loss_mean(Tensor self, Tensor target, Tensor? weight, int reduction, int ignore_index) -> (Tensor, Tensor)");
  m.def(
      "nll_loss2d_mean(Tensor self, Tensor target, Tensor? weight, int reduction, int ignore_index) -> (Tensor, "
      "Tensor)");
}

TORCH_LIBRARY_IMPL(tessera, CompositeExplicitAutograd, m) {
  m.impl("mse_loss_of", mse_loss_of);
  m.impl("smooth_l1_loss_of", smooth_l1_loss_of);
  m.impl("huber_loss_of", huber_loss_of);
  m.impl("soft_margin_loss_of", soft_margin_loss_of);
  m.impl("binary_cross_entropy_of", binary_cross_entropy_of);
  m.impl("binary_cross_entropy_with_logits_of", binary_cross_entropy_with_logits_of);
  m.impl("mse_loss_backward_of", mse_loss_backward_of);
  m.impl("smooth_l1_loss_backward_of", smooth_l1_loss_backward_of);
  m.impl("huber_loss_backward_of", huber_loss_backward_of);
  m.impl("soft_margin_loss_backward_of", soft_margin_loss_backward_of);
  m.impl("binary_cross_entropy_backward_of", binary_cross_entropy_backward_of);
  m.impl("nll_loss_mean", nll_loss_mean);
  m.impl("nll_loss2d_mean", nll_loss2d_mean);
}

}  // namespace tessera
