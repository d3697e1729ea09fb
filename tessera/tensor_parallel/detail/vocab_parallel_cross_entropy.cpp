#include "tessera/tensor_parallel/detail/vocab_parallel_cross_entropy.h"

#include "tessera/base/detail/libtorch_autograd_compat.h"
#include "tessera/base/error.h"
#include "tessera/comm/functional_collectives.h"
#include "tessera/dtensor/detail/autograd_functions.h"
#include "tessera/tensor_parallel/detail/vocab_parallel_loss.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/full.h>
#include <ATen/ops/nll_loss_nd.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/functions/basic_ops.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <algorithm>
#include <limits>
#include <vector>

// For one position, with logits x, target t, class weights w (ones if none are given), C classes and smoothing a:
//
//   m = max x     s = sum_c exp(x_c - m)     u = sum_c w_c (x_c - m)     W = sum_c w_c     log p_c = x_c - m - log s
//
//   loss    =  -(1 - a) w_t log p_t  -  a/C sum_c w_c log p_c
//           =  -(1 - a) w_t (x_t - m - log s)  -  a/C (u - W log s)
//   d/dx_c  =  ((1 - a) w_t + a/C W) exp(x_c - m) / s  -  (1 - a) w_t [c = t]  -  a/C w_c
//
// Ranks exchange only x_t, m, s and u, which are reductions over classes. With x, m and s saved, backward does not
// communicate. An ignored position has loss 0 and gradient 0. For log-probabilities x the loss is -w_t x_t.
namespace tessera {
namespace {

using at::Tensor;
using detail::VocabParallelLoss;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

// ---- Local tensors: x is (N, C', d1, ...), all others are (N, d1, ...).

Tensor is_ignored(const VocabParallelLoss& loss) { return loss.target.eq(loss.classes.ignore_index); }

// w_t; the weight of class 0 if the target is ignored.
Tensor target_weight(const VocabParallelLoss& loss) {
  return loss.weight.take(loss.target.masked_fill(is_ignored(loss), 0));
}

// t times W, the sum of all class weights.
Tensor times_total_weight(const Tensor& t, const VocabParallelLoss& loss) {
  return loss.weight.defined() ? t.mul(loss.weight.sum()) : t.mul(static_cast<double>(loss.classes.num_classes));
}

// t times w_c for each class. t has the shape of x, or broadcasts to it.
Tensor times_class_weights(const Tensor& t, const VocabParallelLoss& loss) {
  if (!loss.weight.defined()) return t;
  std::vector<Tensor> local = {loss.weight.slice(0, 0, 0)};
  const auto& runs = loss.classes.runs;
  for (size_t i = 0; i < runs.size(); i += 2) local.push_back(loss.weight.slice(0, runs[i], runs[i + 1]));
  Sizes shape(static_cast<size_t>(t.dim()), 1);
  shape[static_cast<size_t>(loss.classes.dim)] = -1;
  return t.mul(at::cat(local).view(shape));
}

double smoothing_per_class(const VocabParallelLoss& loss) {
  return loss.smoothing / static_cast<double>(loss.classes.num_classes);
}

// The maximum over the local classes; -infinity if this rank has none.
Tensor max_of_classes(const Tensor& x, const VocabParallelLoss& loss) {
  if (x.size(loss.classes.dim) > 0) return x.amax(loss.classes.dim).to(loss.compute_dtype());
  constexpr double kLowest = -std::numeric_limits<double>::infinity();
  return at::full(loss.target.sizes(), kLowest, x.options().dtype(loss.compute_dtype()));
}

// ---- Forward: one value per position.

struct LossForward {
  Tensor losses;
  Tensor max, sum_exp;  // m and s
};

LossForward forward_of_logits(const VocabParallelLoss& loss) {
  at::AutoDispatchBelowADInplaceOrView below;
  const auto& x = detail::local_of(loss.scores);
  const int64_t dim = loss.classes.dim;
  const bool smooth = loss.smoothing > 0;

  auto at_target = detail::pick_class(x, loss.target, loss.classes).to(loss.compute_dtype());
  auto max = max_of_classes(x, loss);
  for (const auto& group : loss.groups) {
    max = funcol::all_reduce(max, ReduceOp::Max, group);
    at_target = funcol::all_reduce(at_target, ReduceOp::Sum, group);
    funcol::wait(max, group);
    funcol::wait(at_target, group);
  }
  auto shifted = x.sub(max.unsqueeze(dim));  // in the wider dtype of x and max
  const auto u = smooth ? times_class_weights(shifted, loss).sum(dim) : Tensor();
  auto sums = shifted.exp_().sum(dim);
  if (smooth) sums = at::stack({sums, u});
  for (const auto& group : loss.groups) {
    sums = funcol::all_reduce(sums, ReduceOp::Sum, group);
    funcol::wait(sums, group);
  }
  const auto s = smooth ? sums.select(0, 0) : sums;
  const auto log_s = s.log();
  auto losses = log_s.sub(at_target.sub(max)).mul_(1 - loss.smoothing);  // large logits cancel before log s is added
  if (loss.weight.defined()) losses.mul_(target_weight(loss));
  if (smooth) losses.sub_(sums.select(0, 1).sub(times_total_weight(log_s, loss)).mul_(smoothing_per_class(loss)));
  return {losses.masked_fill_(is_ignored(loss), 0), max, s};
}

LossForward forward_of_log_probs(const VocabParallelLoss& loss) {
  at::AutoDispatchBelowADInplaceOrView below;
  auto losses = detail::pick_class(detail::local_of(loss.scores), loss.target, loss.classes).to(loss.compute_dtype());
  for (const auto& group : loss.groups) {
    losses = funcol::all_reduce(losses, ReduceOp::Sum, group);
    funcol::wait(losses, group);
  }
  losses.neg_();
  if (loss.weight.defined()) losses.mul_(target_weight(loss));
  return {losses.masked_fill_(is_ignored(loss), 0), {}, {}};
}

// ---- Backward: `gradient` is the gradient of the losses. `max` and `sum_exp` are undefined for log-probabilities.

Tensor gradient_of_scores(const VocabParallelLoss& loss, const Tensor& gradient, const Tensor& max,
                          const Tensor& sum_exp) {
  at::AutoDispatchBelowADInplaceOrView below;
  const auto& x = detail::local_of(loss.scores);
  const int64_t dim = loss.classes.dim;
  // A mean over no position has an infinite gradient. It must not reach ignored positions.
  const auto g = gradient.masked_fill(is_ignored(loss), 0);
  auto of_target = g.mul(1 - loss.smoothing);
  if (loss.weight.defined()) of_target.mul_(target_weight(loss));

  Tensor result;
  if (max.defined()) {
    const auto of_each = g.mul(smoothing_per_class(loss));
    const auto scale = times_total_weight(of_each, loss).add_(of_target).div_(sum_exp);
    result = x.sub(max.unsqueeze(dim)).exp_().mul_(scale.unsqueeze(dim));
    if (loss.smoothing > 0) result.sub_(times_class_weights(of_each.unsqueeze(dim), loss));
  } else {
    result = at::zeros_like(x, x.options().dtype(loss.compute_dtype()));
  }
  detail::add_to_class_(result, loss.target, of_target.neg_(), loss.classes);
  return result.to(x.scalar_type());
}

struct VocabParallelLossBackward final : torch::autograd::Node {
  VocabParallelLoss loss;  // without its tensors, which are saved variables
  SavedVariable scores, target, weight, max, sum_exp;

  variable_list apply(variable_list&& gradients) override {
    if (!gradients[0].defined()) return {Tensor()};
    TESSERA_CHECK(is_dtensor(gradients[0]), UsageError,
                  "backward of a vocab-parallel loss: the gradient is a plain tensor of sizes ", gradients[0].sizes(),
                  "; pass a distributed gradient to backward(), such as ones_like(loss)");
    auto unpacked = loss;
    unpacked.scores = scores.unpack();
    unpacked.target = target.unpack();
    unpacked.weight = weight.unpack();
    const auto gradient = detail::redistribute(gradients[0], loss.position_spec->placements);
    auto local = gradient_of_scores(unpacked, detail::local_of(gradient), max.unpack(), sum_exp.unpack());

    const auto& spec = *detail::meta_of(unpacked.scores).spec;
    const auto dense = strides_in_order_of(spec.sizes, spec.strides);
    auto result =
        detail::wrap(std::move(local), intern(spec.mesh, spec.placements, spec.sizes, dense, spec.dtype, spec.device));
    if (at::GradMode::is_enabled())
      torch::autograd::set_history(result, libtorch::make_node<torch::autograd::NotImplemented>(
                                               "the gradient of a vocab-parallel loss",
                                               torch::autograd::collect_next_edges(unpacked.scores, gradient)));
    return {result};
  }

  void release_variables() override {
    for (auto* saved : {&scores, &target, &weight, &max, &sum_exp}) saved->reset_data();
  }
};

// One loss per position, distributed, with its autograd history.
Tensor losses_of(const VocabParallelLoss& loss, LossForward (*forward)(const VocabParallelLoss&)) {
  const bool differentiable = at::GradMode::is_enabled() && loss.scores.requires_grad();
  const auto found = forward(loss);
  auto losses = detail::wrap(found.losses, loss.position_spec);
  if (!differentiable) return losses;
  auto node = libtorch::make_node<VocabParallelLossBackward>();
  node->set_next_edges(torch::autograd::collect_next_edges(loss.scores));
  node->scores = SavedVariable(loss.scores, false);
  node->target = SavedVariable(loss.target, false);
  node->weight = SavedVariable(loss.weight, false);
  node->max = SavedVariable(found.max, false);
  node->sum_exp = SavedVariable(found.sum_exp, false);
  node->loss = loss;
  node->loss.scores = node->loss.target = node->loss.weight = Tensor();
  torch::autograd::set_history(losses, node);
  return losses;
}

// The denominator of the mean: the total weight of the positions that are not ignored, over all ranks.
Tensor denominator(const VocabParallelLoss& loss) {
  at::AutoDispatchBelowADInplaceOrView below;
  const auto ignored = is_ignored(loss);
  auto local = loss.weight.defined() ? target_weight(loss).masked_fill_(ignored, 0).sum()
                                     : ignored.logical_not().sum().to(loss.compute_dtype());
  const auto& spec = *loss.position_spec;
  Placements partial(spec.placements);
  for (auto& p : partial) p = p.is_sharded() ? Partial() : Replicate();
  const auto partial_spec = intern(spec.mesh, partial, {}, {}, spec.dtype, spec.device);
  const Placements replicated(partial.size(), Replicate());
  return detail::redistribute_no_grad(detail::wrap(local, partial_spec), with_placements(*partial_spec, replicated));
}

Tensor reduced(const VocabParallelLoss& loss, const Tensor& losses, at::Reduction::Reduction reduction) {
  auto result = losses;
  if (reduction != at::Reduction::None) result = result.sum();
  if (reduction == at::Reduction::Mean) result = result.div(denominator(loss));
  return result.to(loss.scores.scalar_type());
}

}  // namespace

bool classes_are_sharded(const Tensor& scores) {
  if (!is_dtensor(scores) || scores.dim() == 0) return false;
  return std::ranges::any_of(detail::meta_of(scores).spec->placements,
                             [&](const Placement& p) { return p.is_sharded(detail::class_dim(scores)); });
}

Tensor vocab_parallel_cross_entropy(const Tensor& logits, const Tensor& target, const CrossEntropyOptions& options) {
  if (!is_dtensor(logits))
    return at::cross_entropy_loss(logits, target, options.weight, options.reduction, options.ignore_index,
                                  options.label_smoothing);
  const auto loss = detail::prepare_loss("vocab_parallel_cross_entropy", logits, target, options);
  return reduced(loss, losses_of(loss, forward_of_logits), options.reduction);
}

Tensor vocab_parallel_nll_loss(const Tensor& log_probs, const Tensor& target, const CrossEntropyOptions& options) {
  TESSERA_CHECK(options.label_smoothing == 0, UsageError, "vocab_parallel_nll_loss: label_smoothing is ",
                options.label_smoothing, "; use vocab_parallel_cross_entropy, which takes logits, for label smoothing");
  if (!is_dtensor(log_probs))
    return at::nll_loss_nd(log_probs, target, options.weight, options.reduction, options.ignore_index);
  const auto loss = detail::prepare_loss("vocab_parallel_nll_loss", log_probs, target, options);
  return reduced(loss, losses_of(loss, forward_of_log_probs), options.reduction);
}

}  // namespace tessera
