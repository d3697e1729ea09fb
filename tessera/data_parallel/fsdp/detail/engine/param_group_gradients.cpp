#include "tessera/data_parallel/fsdp/detail/engine/param_group_gradients.h"

#include "tessera/base/detail/same_storage.h"
#include "tessera/comm/detail/collective_label.h"
#include "tessera/comm/detail/inplace_ops.h"
#include "tessera/comm/detail/segment_ops.h"
#include "tessera/comm/functional_collectives.h"
#include "tessera/data_parallel/detail/local_gradient.h"
#include "tessera/data_parallel/fsdp/detail/engine/param_group.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/tracing/detail/compiling_scope.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/StreamGuard.h>

#include <algorithm>

namespace tessera::data_parallel::fsdp {

ParamGroupGradients::ParamGroupGradients(ParamGroup& group)
    : group_(group),
      unsharded_grads_(group.params().size()),
      ready_(group.params().size(), 0),
      deferred_(group.params().size(), 0),
      saved_grads_(group.params().size()) {
  for (size_t i = 0; i < group.params().size(); i++) {
    const auto& tensor = group.params()[i].tensor;
    if (!tensor.requires_grad()) continue;
    // Runs before autograd adds the gradient to .grad, which must then be empty or unsharded.
    const auto pre_hook =
        tensor.register_hook([this](const at::Tensor&) { group_.notify_before_backward(/*needs_values=*/false); });
    hooks_.emplace_back([tensor, pre_hook] { tensor.remove_hook(pre_hook); });
    hooks_.push_back(register_post_accumulate_grad_hook(tensor, [this, i](const at::Tensor&) { gradient_ready(i); }));
  }
}

ParamGroupGradients::~ParamGroupGradients() {
  for (auto& hook : hooks_) hook.remove();
}

double ParamGroupGradients::divide_factor() const {
  const auto& replicas = group_.replicate_group();
  const auto ranks = group_.shard_group()->size() * (replicas ? replicas->size() : 1);
  return divide_factor_.value_or(static_cast<double>(ranks));
}

// The mean is a sum and a division. As in PyTorch, float16 is divided before and after the sum, so that neither
// overflows nor underflows. The factor before the sum is a power of two. Other dtypes are divided only after the sum,
// which saves a pass over the gradients.
double ParamGroupGradients::predivide_factor(c10::ScalarType dtype) const {
  double factor = 1;
  if (dtype == c10::ScalarType::Half)
    while (divide_factor() / factor > factor) factor *= 2;
  return factor;
}

void ParamGroupGradients::begin_backward() {
  in_backward_ = true;
  num_pending_ = 0;
  const auto& params = group_.params();
  for (size_t i = 0; i < params.size(); i++) {
    saved_grads_[i] = std::exchange(params[i].tensor.mutable_grad(), {});
    num_pending_ += params[i].tensor.requires_grad() && will_accumulate(params[i].tensor);
  }
}

void ParamGroupGradients::gradient_ready(size_t i) {
  if (!in_backward_) return;  // the module did not run through the schedule
  const at::NoGradGuard no_grad;
  const auto& [name, tensor, unsharded_spec, sharded_spec] = group_.params()[i];
  if (sharded_spec && is_dtensor(tensor.grad()) && DTensor(tensor.grad()).device_mesh() == sharded_spec->mesh) {
    // The sharded parameter itself was used, for example in a penalty: this is the gradient of the shard.
    auto sharded_grad = std::exchange(tensor.mutable_grad(), {});
    auto& saved = saved_grads_[i];
    saved = saved.defined() ? saved.add_(sharded_grad) : DTensor(sharded_grad).redistribute(sharded_spec->placements);
  } else {
    const auto gradient = local_gradient(tensor.grad(), unsharded_spec, name);
    const auto dtype = group_.options().reduce_dtype.value_or(gradient.scalar_type());
    auto ordered = group_.layout().in_shard_order(i, gradient.to(dtype));
    if (const double factor = predivide_factor(ordered.scalar_type()); factor != 1) ordered = ordered.div(factor);
    if (ready_[i])
      unsharded_grads_[i].add_(ordered);
    else
      unsharded_grads_[i] = std::move(ordered);
    ready_[i] = true;
    tensor.mutable_grad().reset();
  }
  if (num_pending_ > 0 && --num_pending_ == 0) group_.notify_gradients_ready();
}

bool ParamGroupGradients::any_ready() const { return std::find(ready_.begin(), ready_.end(), 1) != ready_.end(); }

void ParamGroupGradients::free_unsharded_grads() {
  std::fill(unsharded_grads_.begin(), unsharded_grads_.end(), at::Tensor());
}

void ParamGroupGradients::reduce_scatter(bool all_reduce) {
  in_backward_ = false;
  all_reduce_ = all_reduce;
  if (!any_ready()) return restore_saved_grads();
  const at::NoGradGuard no_grad;
  const c10::OptionalStreamGuard stream(group_.streams().reduce_scatter);
  const auto& layout = group_.layout();
  at::TensorOptions options;
  for (const auto& gradient : unsharded_grads_)
    if (gradient.defined()) options = gradient.options();
  in_flight_ = InFlight::ReduceScatter;
  if (group_.shard_group()->size() == 1) {
    reduced_ = at::zeros({layout.shard_numel()}, options);
    for (size_t i = 0; i < ready_.size(); i++)
      if (ready_[i]) layout.unsharded_param(i, reduced_).copy_(std::exchange(unsharded_grads_[i], {}));
    return;
  }
  reduced_ = at::empty({layout.shard_numel()}, options);
  for (auto& gradient : unsharded_grads_)
    if (!gradient.defined()) gradient = at::empty({0}, options);  // gradient_segments() pads in its place
  const comm::CollectiveLabel label(group_.name().c_str(), group_.index());
  comm::reduce_scatter_segments_into_(reduced_, unsharded_grads_, layout.gradient_segments(ready_), ReduceOp::Sum,
                                      group_.shard_group());
}

void ParamGroupGradients::all_reduce() {
  if (in_flight_ != InFlight::ReduceScatter) return;
  const at::NoGradGuard no_grad;
  const c10::OptionalStreamGuard stream(group_.streams().reduce_scatter);
  funcol::wait(reduced_, group_.shard_group());
  free_unsharded_grads();
  in_flight_ = InFlight::None;
  const auto& replicas = group_.replicate_group();
  if (!replicas || replicas->size() == 1 || !all_reduce_) return;
  if (deferred_all_reduce_.defined()) reduced_.add_(std::exchange(deferred_all_reduce_, {}));
  in_flight_ = InFlight::AllReduce;
  const comm::CollectiveLabel label(group_.name().c_str(), group_.index());
  comm::all_reduce_(reduced_, ReduceOp::Sum, replicas);
}

void ParamGroupGradients::wait_for_reduction() {
  if (!reduced_.defined()) return;
  const at::NoGradGuard no_grad;
  all_reduce();
  if (in_flight_ == InFlight::AllReduce) funcol::wait(reduced_, group_.replicate_group());
  in_flight_ = InFlight::None;
  auto reduced = std::exchange(reduced_, {});
  for (size_t i = 0; i < ready_.size(); i++) deferred_[i] |= std::exchange(ready_[i], 0);
  if (!all_reduce_ && group_.replicate_group()) {
    deferred_all_reduce_ = deferred_all_reduce_.defined() ? deferred_all_reduce_.add_(reduced) : reduced;
    return restore_saved_grads();
  }
  const double postdivide_factor = divide_factor() / predivide_factor(reduced.scalar_type());
  if (postdivide_factor != 1) reduced.div_(postdivide_factor);
  const auto& flat_param = group_.flat_param();
  const auto dtype = group_.options().keep_low_precision_grads ? reduced.scalar_type() : flat_param.scalar_type();
  accumulate(reduced.to(flat_param.options().requires_grad(false).dtype(dtype)));
  restore_saved_grads();
}

// For compiled steps: adds to the existing gradients, so that their memory is the same in the next step.
// Returns false if a gradient does not exist yet.
bool ParamGroupGradients::accumulate_in_place(const at::Tensor& reduced_shard) {
  const auto can_add = [&](const at::Tensor& t) {
    return t.defined() && t.scalar_type() == reduced_shard.scalar_type();
  };
  if (group_.options().flat_parameter) {
    const auto& gradient = group_.flat_param().grad();
    if (!can_add(gradient)) return false;
    gradient.add_(reduced_shard);
    std::fill(deferred_.begin(), deferred_.end(), 0);
    return true;
  }
  const auto& layout = group_.layout();
  const auto rank = group_.shard_group()->rank();
  const auto is_local = [&](size_t i) { return deferred_[i] && layout.range_in_shard(i, rank).size > 0; };
  for (size_t i = 0; i < deferred_.size(); i++)
    if (is_local(i) && !can_add(saved_grads_[i])) return false;
  for (size_t i = 0; i < deferred_.size(); i++) {
    if (is_local(i)) local_or_self(saved_grads_[i]).add_(layout.param_in_shard(i, rank, reduced_shard));
    deferred_[i] = 0;
  }
  return true;
}

void ParamGroupGradients::accumulate(const at::Tensor& reduced_shard) {
  if (compiling() && accumulate_in_place(reduced_shard)) return;
  const auto& layout = group_.layout();
  const auto& flat_param = group_.flat_param();
  const bool flat = group_.options().flat_parameter;
  const auto rank = group_.shard_group()->rank();
  for (size_t i = 0; i < saved_grads_.size(); i++)
    if (saved_grads_[i].defined()) layout.param_in_shard(i, rank, reduced_shard).add_(local_or_self(saved_grads_[i]));
  if (flat && flat_param.grad().defined()) reduced_shard.add_(flat_param.grad());
  flat_param.mutable_grad() = reduced_shard;
  for (size_t i = 0; i < saved_grads_.size(); i++) {
    const bool has_gradient = std::exchange(deferred_[i], 0) || saved_grads_[i].defined();
    const bool is_local = layout.range_in_shard(i, rank).size > 0 || group_.params()[i].sharded_spec;
    if (!flat && has_gradient && is_local) saved_grads_[i] = group_.sharded_view(i, reduced_shard);
  }
}

void ParamGroupGradients::restore_saved_grads() {
  for (size_t i = 0; i < saved_grads_.size(); i++)
    group_.params()[i].tensor.mutable_grad() = std::exchange(saved_grads_[i], {});
}

void ParamGroupGradients::drop_unused_flat_param_grad() {
  const auto& flat_param = group_.flat_param();
  if (group_.options().flat_parameter || !flat_param.defined() || !flat_param.grad().defined()) return;
  const auto has_gradient = [](const FSDPParam& param) { return param.tensor.grad().defined(); };
  if (std::none_of(group_.params().begin(), group_.params().end(), has_gradient)) flat_param.mutable_grad().reset();
}

void ParamGroupGradients::end_backward() {
  in_backward_ = false;
  restore_saved_grads();
}

ParamGroupGradients::State ParamGroupGradients::state() const {
  return {unsharded_grads_, ready_, deferred_all_reduce_, deferred_, divide_factor_};
}

void ParamGroupGradients::restore(const State& state) {
  unsharded_grads_ = state.unsharded_grads;
  ready_ = state.ready;
  deferred_all_reduce_ = state.deferred_all_reduce;
  deferred_ = state.deferred;
  divide_factor_ = state.divide_factor;
}

void ParamGroupGradients::find_flat_param_grad() {
  const auto& flat_param = group_.flat_param();
  if (!flat_param.defined() || group_.options().flat_parameter) return;  // a flat parameter has its own .grad
  const auto& layout = group_.layout();
  const auto rank = group_.shard_group()->rank();
  at::Tensor shard;
  for (size_t i = 0; i < group_.params().size(); i++) {
    const auto& gradient = group_.params()[i].tensor.grad();
    const auto range = layout.range_in_shard(i, rank);
    if (!gradient.defined() || range.size == 0) continue;
    const auto& local = local_or_self(gradient);
    if (!shard.defined()) shard = layout.enclosing_shard(i, rank, local);
    if (!shard.defined() || !same_storage(shard, local) ||
        local.storage_offset() != shard.storage_offset() + range.begin)
      return flat_param.mutable_grad().reset();
  }
  flat_param.mutable_grad() = shard;
}

void ParamGroupGradients::abandon() {
  const bool has_saved_grads = in_backward_ || is_reducing();
  in_backward_ = false;
  discard(reduced_, in_flight_ == InFlight::AllReduce ? group_.replicate_group() : group_.shard_group());
  in_flight_ = InFlight::None;
  free_unsharded_grads();
  deferred_all_reduce_.reset();
  std::fill(ready_.begin(), ready_.end(), 0);
  std::fill(deferred_.begin(), deferred_.end(), 0);
  if (has_saved_grads) restore_saved_grads();
}

}  // namespace tessera::data_parallel::fsdp
