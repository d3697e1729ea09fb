#include "tessera/data_parallel/detail/group_batch_norm.h"

#include "tessera/base/detail/libtorch_autograd_compat.h"
#include "tessera/base/detail/module_name.h"
#include "tessera/base/error.h"
#include "tessera/comm/functional_collectives.h"
#include "tessera/dtensor/detail/meta.h"

#include <ATen/OpMathType.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/addcmul.h>
#include <ATen/ops/batch_norm_update_stats.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <ATen/ops/native_batch_norm.h>
#include <ATen/ops/native_batch_norm_backward.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/functions/basic_ops.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <tuple>
#include <utility>
#include <vector>

// x, y and dy have shape (N, C, ...). All ranks together have n values per channel. For each channel: mean m,
// variance v, r = 1 / sqrt(v + eps), xhat = (x - m) r:
//
//   y  = w xhat + b
//   dw = sum dy xhat        db = sum dy                                   over this rank's values
//   dx = w r (dy - sum dy / n - xhat sum dy xhat / n)                     over all ranks
//
// Given m and v, y is what plain batch norm computes in eval mode. Its backward in eval mode computes w r dy, dw and db
// in one pass. Ranks exchange dw and db. The rest of dx is one value per channel times x, plus another.
namespace tessera::detail {
namespace {

using at::Tensor;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

// Of the global batch: (C), (C) and one value.
struct BatchStatistics {
  Tensor mean, variance, count;
};

int64_t values_per_channel(const Tensor& x) { return x.size(1) == 0 ? 0 : x.numel() / x.size(1); }

// The dtype of statistics and of computations with them: float for bfloat16 and half.
at::ScalarType computed_in(const Tensor& x) { return at::toOpMathType(x.scalar_type()); }

Tensor as_channels(const Tensor& t, const Tensor& x) {
  std::vector<int64_t> shape(static_cast<size_t>(x.dim()), 1);
  shape[1] = -1;
  return t.view(shape);
}

void check_input(const Tensor& x, const BatchNormParts& parts) {
  TESSERA_CHECK(!is_dtensor(x), UsageError, "batch norm '", running_module(), "' over a group: its input, of sizes ",
                x.sizes(),
                ", is a DTensor. Batch norm of a DTensor already uses the statistics of the global tensor: exclude ",
                "this module from convert_sync_batchnorm, or give it to_local()");
  TESSERA_CHECK(x.dim() >= 2 && x.size(1) == parts.num_features && parts.num_features > 0, UsageError, "batch norm '",
                running_module(), "' over a group: found an input of sizes ", x.sizes(), "; expected (N, ",
                parts.num_features, ", ...)");
}

// [mean, M2, count] of the local batch, where M2 is the sum of squares of x - mean: (2C + 1).
Tensor local_statistics(const Tensor& x) {
  const auto n = values_per_channel(x);
  const auto options = x.options().dtype(computed_in(x));
  if (n == 0) return at::zeros({2 * x.size(1) + 1}, options);
  const auto [mean, variance] = at::batch_norm_update_stats(x.to(computed_in(x)), {}, {}, 0);
  return at::cat({mean, variance * static_cast<double>(n), at::full({1}, n, options)});
}

// Chan, Golub, LeVeque: M2 = sum of M2_r + n_r (mean_r - mean)^2. It has no difference of large numbers, and a rank
// without values contributes nothing.
BatchStatistics global_statistics(const Tensor& x, const comm::Group& group) {
  const auto channels = x.size(1);
  const auto gathered = funcol::all_gather(local_statistics(x).unsqueeze(0), 0,
                                           std::vector<int64_t>(static_cast<size_t>(group->size()), 1), group);
  funcol::wait(gathered, group);
  const auto means = gathered.narrow(1, 0, channels), m2 = gathered.narrow(1, channels, channels),
             counts = gathered.narrow(1, 2 * channels, 1);
  const auto count = counts.sum();
  const auto mean = (means * counts).sum(0) / count;
  const auto variance = (m2 + counts * (means - mean).square()).sum(0) / count;
  return {mean, variance, count};
}

// Returns false if no rank has values. A rank with two values needs no check. If there are too few values, no rank has
// two, so all ranks check and fail together. The usual case does not copy to the host.
bool check_enough_values(const Tensor& x, const Tensor& count, const comm::Group& group) {
  if (values_per_channel(x) > 1) return true;
  const auto all = count.item<double>();
  TESSERA_CHECK(all != 1, UsageError, "batch norm '", running_module(),
                "' in training: expected more than 1 value per channel, but group '", group->name(), "' of ",
                group->size(), " ranks has 1 in total; this rank's input has sizes ", x.sizes());
  return all > 0;
}

void update_running(const BatchStatistics& all, const BatchNormParts& parts) {
  const auto& running = parts.running_mean;
  const auto momentum = parts.momentum ? at::scalar_tensor(*parts.momentum, running.scalar_type())
                                       : parts.num_batches_tracked.to(running.scalar_type()).reciprocal();
  const auto update = [&](const Tensor& t, const Tensor& now) {
    t.mul_(1 - momentum).add_(now.to(t.scalar_type()) * momentum);
  };
  update(parts.running_mean, all.mean);
  update(parts.running_var, all.variance * (all.count / (all.count - 1)));  // the unbiased one
}

Tensor to_type(const Tensor& t, at::ScalarType type) { return t.defined() ? t.to(type) : t; }

Tensor normalise(const Tensor& x, const BatchStatistics& all, const BatchNormParts& parts) {
  if (x.numel() == 0) return at::empty_like(x);
  const auto type = computed_in(x);
  return std::get<0>(at::native_batch_norm(x, to_type(parts.weight, type), to_type(parts.bias, type), all.mean,
                                           all.variance, /*training=*/false, 0, parts.eps));
}

struct BatchNormGradients {
  Tensor x, weight, bias;  // weight and bias: of the local batch
};

// `group`: null if dx is not needed.
BatchNormGradients batch_norm_backward(const Tensor& dy, const Tensor& x, const Tensor& weight,
                                       const BatchStatistics& all, double eps, const comm::Group& group) {
  const at::NoGradGuard no_grad;
  const auto type = computed_in(x);
  const auto w = to_type(weight, type);
  const bool empty = x.numel() == 0;
  BatchNormGradients d{at::zeros_like(x), at::zeros_like(all.mean), at::zeros_like(all.mean)};
  if (!empty)
    std::tie(d.x, d.weight, d.bias) = at::native_batch_norm_backward(
        dy, x, w, all.mean, all.variance, {}, {}, /*train=*/false, eps, {group.defined(), true, true});
  if (!group) return d;

  const auto sums = funcol::all_reduce(at::cat({d.bias, d.weight}), ReduceOp::Sum, group);
  funcol::wait(sums, group);
  if (empty) return d;
  const auto channels = x.size(1);
  const auto r = (all.variance + eps).rsqrt();
  const auto wr = (w.defined() ? w * r : r) / all.count;
  const auto times_x = -wr * r * sums.narrow(0, channels, channels);         // (C)
  const auto plus = -wr * sums.narrow(0, 0, channels) - times_x * all.mean;  // (C)
  d.x = (d.x + at::addcmul(as_channels(plus, x), x, as_channels(times_x, x))).to(x.scalar_type());
  return d;
}

struct GroupBatchNormBackward final : torch::autograd::Node {
  SavedVariable x, weight, mean, variance, count;
  double eps = 0;
  comm::Group group;

  variable_list apply(variable_list&& given) override {
    const auto input = x.unpack(), w = weight.unpack();
    // A rank whose output is unused still takes part in the collective.
    const auto dy = given[0].defined() ? given[0] : at::zeros_like(input);
    const bool dx = task_should_compute_output(0), dw = task_should_compute_output(1),
               db = task_should_compute_output(2);
    const auto d = batch_norm_backward(dy, input, w, {mean.unpack(), variance.unpack(), count.unpack()}, eps,
                                       dx ? group : comm::Group());
    variable_list result = {dx ? d.x : Tensor(), dw ? d.weight.to(w.scalar_type()) : Tensor(),
                            db ? d.bias.to(w.scalar_type()) : Tensor()};
    if (at::GradMode::is_enabled()) {
      const auto refuse = libtorch::make_node<torch::autograd::NotImplemented>(
          "the gradient of batch norm over a group", torch::autograd::collect_next_edges(input, w, dy));
      for (auto& t : result)
        if (t.defined()) torch::autograd::set_history(t, refuse);
    }
    return result;
  }

  void release_variables() override {
    for (auto* saved : {&x, &weight, &mean, &variance, &count}) saved->reset_data();
  }
};

}  // namespace

Tensor group_batch_norm(const Tensor& x, const BatchNormParts& parts, const comm::Group& group) {
  check_input(x, parts);
  Tensor y;
  BatchStatistics all;
  {
    const at::NoGradGuard no_grad;
    all = global_statistics(x, group);
    const bool any = check_enough_values(x, all.count, group);
    if (parts.num_batches_tracked.defined()) parts.num_batches_tracked.add_(1);
    if (any && parts.running_mean.defined()) update_running(all, parts);
    y = normalise(x, all, parts);
  }
  if (!torch::autograd::compute_requires_grad(x, parts.weight, parts.bias)) return y;
  auto node = libtorch::make_node<GroupBatchNormBackward>();
  node->set_next_edges(torch::autograd::collect_next_edges(x, parts.weight, parts.bias));
  node->x = SavedVariable(x, false);
  node->weight = SavedVariable(parts.weight, false);
  node->mean = SavedVariable(all.mean, false);
  node->variance = SavedVariable(all.variance, false);
  node->count = SavedVariable(all.count, false);
  node->eps = parts.eps;
  node->group = group;
  torch::autograd::set_history(y, node);
  return y;
}

}  // namespace tessera::detail
