#include "tessera/data_parallel/fsdp/detail/engine/param_group_gradients.h"

#include "tessera/base/detail/same_storage.h"
#include "tessera/comm/detail/collective_label.h"
#include "tessera/comm/detail/inplace_ops.h"
#include "tessera/comm/detail/segment_ops.h"
#include "tessera/comm/functional_collectives.h"
#include "tessera/data_parallel/detail/local_gradient.h"
#include "tessera/data_parallel/detail/requires_grad_agreement.h"
#include "tessera/data_parallel/fsdp/detail/engine/param_group.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/tracing/detail/compiling_scope.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/count_nonzero.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <c10/core/StreamGuard.h>

#include <algorithm>

namespace tessera::data_parallel::fsdp {
namespace {

// The first elements. Autograd does not treat them as a view, because optimizers call detach_() on gradients.
at::Tensor below_autograd_narrow(const at::Tensor& buffer, int64_t numel) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return buffer.numel() == numel ? buffer : buffer.narrow(0, 0, numel);
}

// Adds two reduced shards in place. One of a compiled step has no flags.
at::Tensor sum_of(const at::Tensor& a, const at::Tensor& b) {
  if (a.numel() == b.numel()) return a.add_(b);
  const auto& larger = a.numel() > b.numel() ? a : b;
  const auto& smaller = a.numel() > b.numel() ? b : a;
  larger.narrow(0, 0, smaller.numel()).add_(smaller);
  return larger;
}

}  // namespace

ParamGroupGradients::ParamGroupGradients(ParamGroup& group)
    : group_(group),
      unsharded_grads_(group.params().size()),
      ready_(group.params().size(), 0),
      deferred_(group.params().size(), 0),
      saved_grads_(group.params().size()),
      shown_(group.options().flat_parameter ? 1 : group.params().size()) {
  for (size_t i = 0; i < group.params().size(); i++) {
    const auto& tensor = group.params()[i].tensor;  // a frozen one may be unfrozen later
    // Runs before autograd adds the gradient to .grad, which must then be empty or unsharded.
    hooks_.push_back(register_hook_on_any_leaf(tensor, [this](const at::Tensor& leaf) {
      const auto hook =
          leaf.register_hook([this](const at::Tensor&) { group_.notify_before_backward(/*needs_values=*/false); });
      return GradHookHandle([leaf, hook] { leaf.remove_hook(hook); });
    }));
    hooks_.push_back(register_hook_on_any_leaf(tensor, [this, i](const at::Tensor& leaf) {
      return register_post_accumulate_grad_hook(leaf, [this, i](const at::Tensor&) { gradient_ready(i); });
    }));
  }
}

ParamGroupGradients::~ParamGroupGradients() {
  for (auto& hook : hooks_) hook.remove();
}

double ParamGroupGradients::divide_factor() const {
  if (reduction_hooks_.reduce_scatter || reduction_hooks_.all_reduce) return 1;
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
  take_unreduced();
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
  if (!tensor.requires_grad()) return;  // frozen after its forward: LibTorch adds no gradient
  if (sharded_spec && is_dtensor(tensor.grad()) && DTensor(tensor.grad()).device_mesh() == sharded_spec->mesh) {
    // The sharded parameter itself was used, for example in a penalty: this is the gradient of the shard.
    auto sharded_grad = std::exchange(tensor.mutable_grad(), {});
    auto& saved = saved_grads_[i];
    saved = saved.defined() ? saved.add_(sharded_grad) : DTensor(sharded_grad).redistribute(sharded_spec->placements);
  } else {
    const auto gradient = local_gradient(tensor.grad(), unsharded_spec, name);
    const auto dtype = group_.options().reduce_dtype.value_or(gradient.scalar_type());
    // A single rank on a GPU converts all gradients of the group with one kernel, in reduce_scatter().
    const bool converts_later = group_.device().is_cuda() && group_.shard_group()->size() == 1 && !ready_[i];
    auto ordered = group_.layout().in_shard_order(i, converts_later ? gradient : gradient.to(dtype));
    if (const double factor = predivide_factor(ordered.scalar_type()); factor != 1) ordered = ordered.div(factor);
    if (ready_[i])
      unsharded_grads_[i] = unsharded_grads_[i].to(dtype).add_(ordered);
    else
      unsharded_grads_[i] = std::move(ordered);
    ready_[i] = true;
    tensor.mutable_grad().reset();
  }
  if (num_pending_ > 0 && --num_pending_ == 0) group_.notify_gradients_ready();
}

bool ParamGroupGradients::any_ready() const { return std::find(ready_.begin(), ready_.end(), 1) != ready_.end(); }
bool ParamGroupGradients::any_trainable() const {
  const auto& params = group_.params();
  return std::any_of(params.begin(), params.end(), [](const FSDPParam& param) { return param.tensor.requires_grad(); });
}

// True if the gradients need neither a reduction nor a conversion, so that each one can be .grad itself.
bool ParamGroupGradients::is_alone() const {
  const auto& hooks = reduction_hooks_;
  const auto& replicas = group_.replicate_group();
  return group_.shard_group()->size() == 1 && (!replicas || replicas->size() == 1) && !group_.layout().is_flat() &&
         !group_.options().offload && !deferred_all_reduce_.defined() && divide_factor() == 1 &&
         !hooks.reduce_scatter && !hooks.all_reduce && !hooks.custom_reduce_scatter && !hooks.after_reduction &&
         std::all_of(unsharded_grads_.begin(), unsharded_grads_.end(), [&](const at::Tensor& gradient) {
           return !gradient.defined() || gradient.scalar_type() == group_.flat_param().scalar_type();
         });
}

// The reduction of a group for which is_alone().
void ParamGroupGradients::accumulate_unreduced() {
  has_unsharded_passes_ = has_deferred_passes_ = false;
  group_.flat_param().mutable_grad().reset();
  for (size_t i = 0; i < ready_.size(); i++) {
    if (!std::exchange(ready_[i], 0)) continue;
    const auto gradient = std::exchange(unsharded_grads_[i], {});
    auto& saved = saved_grads_[i];
    if (saved.defined())
      local_or_self(saved).add_(gradient);
    else
      saved = tessera::detail::wrap(gradient, group_.params()[i].sharded_spec);
  }
  restore_saved_grads();
}

void ParamGroupGradients::free_unsharded_grads() {
  std::fill(unsharded_grads_.begin(), unsharded_grads_.end(), at::Tensor());
}

void ParamGroupGradients::reduce_scatter(bool all_reduce) {
  in_backward_ = false;
  all_reduce_ = all_reduce;
  const bool has_deferred = all_reduce && deferred_all_reduce_.defined();
  // If this rank has no gradient of the group, another rank may have one.
  const bool reduces = compiling() ? any_ready() : any_trainable() || has_unsharded_passes_;
  if (!reduces && !has_deferred) return restore_saved_grads();
  const at::NoGradGuard no_grad;
  if (is_alone()) return accumulate_unreduced();
  includes_earlier_passes_ = std::exchange(has_unsharded_passes_, false) || has_deferred_passes_;
  const c10::OptionalStreamGuard stream(group_.streams().reduce_scatter);
  const auto& layout = group_.layout();
  auto options = at::TensorOptions(group_.device()).dtype(group_.reduce_dtype());
  for (const auto& gradient : unsharded_grads_)
    if (gradient.defined())
      options = gradient.options().dtype(group_.options().reduce_dtype.value_or(gradient.scalar_type()));
  if (has_deferred) options = deferred_all_reduce_.options();
  flags_ = make_flags(options);
  const int64_t num_flags = flags_.defined() ? flags_.numel() : 0, numel = layout.shard_numel() + num_flags;
  in_flight_ = InFlight::ReduceScatter;
  std::vector<bool> requires_grad;
  for (const auto& param : group_.params()) requires_grad.push_back(param.tensor.requires_grad());
  const RequiresGradHash frozen(requires_grad);
  label_ = group_.name() + frozen.text();
  label_number_ = frozen.number(group_.index());
  if (reduces && (reduction_hooks_.reduce_scatter || reduction_hooks_.custom_reduce_scatter))
    return reduce_scatter_by_hook(options);
  if (group_.shard_group()->size() == 1 || !reduces) {
    int64_t copied = num_flags;
    for (size_t i = 0; i < ready_.size(); i++)
      if (ready_[i]) copied += unsharded_grads_[i].numel();
    reduced_ = copied == numel ? at::empty({numel}, options) : at::zeros({numel}, options);  // with zeros as padding
    Tensors places, gradients;
    for (size_t i = 0; i < ready_.size(); i++) {
      if (!ready_[i]) continue;
      places.push_back(layout.unsharded_param(i, reduced_));
      gradients.push_back(std::exchange(unsharded_grads_[i], {}));
      if (!group_.device().is_cuda()) places.back().copy_(std::exchange(gradients.back(), {}));
    }
    if (group_.device().is_cuda() && !places.empty()) at::_foreach_copy_(places, gradients);
    if (num_flags > 0) reduced_.narrow(0, layout.shard_numel(), num_flags).copy_(flags_);
    return;
  }
  reduced_ = at::empty({numel}, options);
  for (auto& gradient : unsharded_grads_)
    if (!gradient.defined()) gradient = at::empty({0}, options);  // gradient_segments() pads in its place
  auto inputs = unsharded_grads_;
  auto segments = layout.gradient_segments(ready_);
  if (num_flags > 0) {
    for (auto& of_rank : segments) of_rank.push_back({static_cast<int32_t>(inputs.size()), 0, num_flags});
    inputs.push_back(flags_);
  }
  const comm::CollectiveLabel label(label_.c_str(), label_number_);
  comm::reduce_scatter_segments_into_(reduced_, inputs, segments, ReduceOp::Sum, group_.shard_group());
}

// The hook gets copies of the gradients in one buffer. The flags have a collective of their own.
void ParamGroupGradients::reduce_scatter_by_hook(const at::TensorOptions& options) {
  const auto& layout = group_.layout();
  const auto& shards = group_.shard_group();
  const int64_t num_flags = flags_.defined() ? flags_.numel() : 0;
  const auto& custom = reduction_hooks_.custom_reduce_scatter;
  const std::vector<int64_t> sizes{shards->size() * layout.shard_numel()};
  custom_input_ = custom ? custom->allocate(sizes, options) : at::empty(sizes, options);
  const auto segments = layout.gradient_segments(ready_);
  int64_t offset = 0;
  for (const auto& of_rank : segments)
    for (const auto& segment : of_rank) {
      const auto place = custom_input_.narrow(0, std::exchange(offset, offset + segment.size), segment.size);
      if (segment.tensor == comm::kPaddingSegment)
        place.zero_();
      else
        place.copy_(
            unsharded_grads_[static_cast<size_t>(segment.tensor)].view({-1}).narrow(0, segment.begin, segment.size));
    }
  reduced_ = at::empty({layout.shard_numel() + num_flags}, options);
  auto shard = reduced_.narrow(0, 0, layout.shard_numel());
  const comm::CollectiveLabel label(label_.c_str(), label_number_);
  if (custom)
    custom_work_ = (*custom)(shard, custom_input_, shards, ReduceOp::Sum, /*async_op=*/true);
  else
    reduction_hooks_.reduce_scatter(custom_input_, shard);
  reduce_flags(shards);
}

// Sums the flags, in their place after the shard.
void ParamGroupGradients::reduce_flags(const comm::Group& group) {
  if (!flags_.defined()) return;
  auto sum = flags_.clone();
  group->all_reduce(sum, ReduceOp::Sum).wait();
  reduced_.narrow(0, group_.layout().shard_numel(), sum.numel()).copy_(sum);
}

// One flag per parameter: this rank has a gradient of it. In a compiled step they are not exchanged, because the step
// does not depend on values: a parameter that this rank does not use has no gradient there.
at::Tensor ParamGroupGradients::make_flags(at::TensorOptions options) const {
  if (compiling()) return {};
  if (std::find(ready_.begin(), ready_.end(), 0) == ready_.end())
    return at::ones({static_cast<int64_t>(ready_.size())}, options);
  auto flags = at::empty({static_cast<int64_t>(ready_.size())}, at::kFloat);
  for (size_t i = 0; i < ready_.size(); i++) flags.data_ptr<float>()[i] = ready_[i];
  return flags.to(options);
}

// Adds the parameters of which only other ranks have a gradient.
void ParamGroupGradients::read_flags(const at::Tensor& flags) {
  bool may_miss = false;
  for (size_t i = 0; i < deferred_.size(); i++)
    may_miss |= !deferred_[i] && (group_.params()[i].tensor.requires_grad() || includes_earlier_passes_);
  if (!may_miss) return;
  const auto read = flags.to(at::kCPU, at::kFloat);
  for (size_t i = 0; i < deferred_.size(); i++) deferred_[i] |= read.data_ptr<float>()[i] > 0;
}

void ParamGroupGradients::all_reduce() {
  if (in_flight_ != InFlight::ReduceScatter) return;
  const at::NoGradGuard no_grad;
  const c10::OptionalStreamGuard stream(group_.streams().reduce_scatter);
  if (auto work = std::exchange(custom_work_, {})) work.wait();
  funcol::wait(reduced_, group_.shard_group());
  custom_input_.reset();
  free_unsharded_grads();
  in_flight_ = InFlight::None;
  const auto& replicas = group_.replicate_group();
  if (!replicas || replicas->size() == 1 || !all_reduce_) return;
  if (deferred_all_reduce_.defined()) reduced_ = sum_of(reduced_, std::exchange(deferred_all_reduce_, {}));
  const comm::CollectiveLabel label(label_.c_str(), label_number_);
  if (reduction_hooks_.all_reduce) {
    auto gradient = reduced_.narrow(0, 0, group_.layout().shard_numel());
    reduction_hooks_.all_reduce(gradient);
    return reduce_flags(replicas);
  }
  in_flight_ = InFlight::AllReduce;
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
  const auto numel = group_.layout().shard_numel();
  if (reduced.numel() > numel && !compiling()) read_flags(reduced.narrow(0, numel, reduced.numel() - numel));
  if (!all_reduce_ && group_.replicate_group()) {
    deferred_all_reduce_ = deferred_all_reduce_.defined() ? sum_of(deferred_all_reduce_, reduced) : reduced;
    has_deferred_passes_ = true;
    restore_saved_grads();
    return show_unreduced();
  }
  has_deferred_passes_ = false;
  reduced = below_autograd_narrow(reduced, numel);
  if (std::find(deferred_.begin(), deferred_.end(), 1) == deferred_.end()) return restore_saved_grads();
  const double postdivide_factor = divide_factor() / predivide_factor(reduced.scalar_type());
  if (postdivide_factor != 1) reduced.div_(postdivide_factor);
  if (reduction_hooks_.after_reduction) reduction_hooks_.after_reduction(reduced);
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
  count_unsharded_pass();
  restore_saved_grads();
  show_unreduced();
}

void ParamGroupGradients::count_unsharded_pass() { has_unsharded_passes_ = has_unsharded_passes_ || any_trainable(); }

// ---- gradients that are not reduced yet

// In a compiled step they are not shown: they are state of the program.
void ParamGroupGradients::show_unreduced() {
  if (compiling()) return;
  const at::NoGradGuard no_grad;
  const bool has_deferred = deferred_all_reduce_.defined();
  if (group_.options().flat_parameter) {
    auto& gradient = shown_[0];
    if (any_ready())
      show(gradient, group_.flat_param(), collect_in_one_buffer());
    else if (has_deferred)
      show(gradient, group_.flat_param(), below_autograd_narrow(deferred_all_reduce_, group_.layout().shard_numel()));
    return;
  }
  for (size_t i = 0; i < shown_.size(); i++) {
    const auto& param = group_.params()[i].tensor;
    if (ready_[i])
      show(shown_[i], param, unsharded_grads_[i]);
    else if (has_deferred && deferred_[i])
      show(shown_[i], param, group_.sharded_view(i, deferred_all_reduce_));
  }
}

void ParamGroupGradients::show(Shown& shown, const at::Tensor& holder, at::Tensor gradient) {
  shown.version = gradient._version();
  shown.gradient = gradient;
  shown.reduced = std::exchange(holder.mutable_grad(), std::move(gradient));
}

// For a flat parameter: the unsharded gradients as views of one buffer, which is its .grad.
at::Tensor ParamGroupGradients::collect_in_one_buffer() {
  const auto& layout = group_.layout();
  for (size_t i = 0; i < ready_.size(); i++) {
    auto& gradient = unsharded_grads_[i];
    if (!ready_[i]) continue;
    if (!unsharded_flat_grad_.defined())
      unsharded_flat_grad_ = at::zeros({layout.gathered_numel()}, gradient.options());
    if (same_storage(gradient, unsharded_flat_grad_)) continue;
    const auto place = layout.unsharded_param(i, unsharded_flat_grad_);
    place.copy_(gradient.view(place.sizes()));
    gradient = place;
  }
  return unsharded_flat_grad_;
}

bool ParamGroupGradients::has_shown() const {
  return std::any_of(shown_.begin(), shown_.end(), [](const Shown& shown) { return shown.gradient.defined(); });
}

bool ParamGroupGradients::shows_unreduced() const {
  for (size_t i = 0; i < shown_.size(); i++) {
    const auto& holder = group_.options().flat_parameter ? group_.flat_param() : group_.params()[i].tensor;
    if (shown_[i].gradient.defined() && holder.grad().is_same(shown_[i].gradient)) return true;
  }
  return false;
}

bool ParamGroupGradients::take_unreduced() {
  if (!has_shown()) return false;
  const at::NoGradGuard no_grad;
  if (group_.options().flat_parameter) {
    take(shown_[0], group_.flat_param(), 0, ready_.size());
    unsharded_flat_grad_.reset();
    return true;
  }
  for (size_t i = 0; i < shown_.size(); i++)
    if (shown_[i].gradient.defined()) take(shown_[i], group_.params()[i].tensor, i, i + 1);
  return true;
}

std::vector<at::Tensor> ParamGroupGradients::take_unsharded() {
  take_unreduced();
  std::fill(ready_.begin(), ready_.end(), 0);
  has_unsharded_passes_ = false;
  return std::exchange(unsharded_grads_, std::vector<at::Tensor>(unsharded_grads_.size()));
}

void ParamGroupGradients::set_reduced(const std::vector<at::Tensor>& reduced) {
  const at::NoGradGuard no_grad;
  take_unreduced();
  free_unsharded_grads();
  std::fill(ready_.begin(), ready_.end(), 0);
  has_unsharded_passes_ = false;
  const auto& layout = group_.layout();
  const auto rank = group_.shard_group()->rank();
  at::Tensor shard;
  for (size_t i = 0; i < reduced.size(); i++) {
    if (!reduced[i].defined()) continue;
    if (!shard.defined()) shard = at::zeros({layout.shard_numel()}, reduced[i].options());
    layout.param_in_shard(i, rank, shard).copy_(layout.shard_of_ordered(i, reduced[i], rank));
    deferred_[i] = 1;
  }
  if (!shard.defined()) return;
  accumulate(shard);
  restore_saved_grads();
}

void ParamGroupGradients::take(Shown& shown, const at::Tensor& holder, size_t first_param, size_t end_param) {
  auto& gradient = holder.mutable_grad();
  const auto before = std::exchange(shown, {});
  if (!gradient.is_same(before.gradient)) {  // zero_grad(), or the user has set another gradient
    for (size_t i = first_param; i < end_param; i++) discard_unreduced(i);
    return;
  }
  // After zero_grad(false) the other parts are zero too: gradients that were reduced before, or deferred.
  if (gradient._version() != before.version && local_or_self(gradient).count_nonzero().item<int64_t>() == 0) {
    if (before.reduced.defined()) local_or_self(before.reduced).zero_();
    if (deferred_all_reduce_.defined())
      for (size_t i = first_param; i < end_param; i++)
        group_.layout().param_in_shard(i, group_.shard_group()->rank(), deferred_all_reduce_).zero_();
  }
  gradient = before.reduced;
}

void ParamGroupGradients::discard_unreduced(size_t i) {
  unsharded_grads_[i].reset();
  ready_[i] = 0;
  if (!deferred_all_reduce_.defined()) return;
  deferred_[i] = 0;
  const auto& layout = group_.layout();
  layout.param_in_shard(i, group_.shard_group()->rank(), deferred_all_reduce_).zero_();
  if (deferred_all_reduce_.numel() > layout.shard_numel())
    deferred_all_reduce_[layout.shard_numel() + static_cast<int64_t>(i)].zero_();
}

ParamGroupGradients::State ParamGroupGradients::state() const {
  return {.unsharded_grads = unsharded_grads_,
          .ready = ready_,
          .deferred_all_reduce = deferred_all_reduce_,
          .deferred = deferred_,
          .has_unsharded_passes = has_unsharded_passes_,
          .has_deferred_passes = has_deferred_passes_,
          .shown = shown_,
          .unsharded_flat_grad = unsharded_flat_grad_,
          .divide_factor = divide_factor_};
}

void ParamGroupGradients::restore(const State& state) {
  unsharded_grads_ = state.unsharded_grads;
  ready_ = state.ready;
  deferred_all_reduce_ = state.deferred_all_reduce;
  deferred_ = state.deferred;
  has_unsharded_passes_ = state.has_unsharded_passes;
  has_deferred_passes_ = state.has_deferred_passes;
  shown_ = state.shown;
  unsharded_flat_grad_ = state.unsharded_flat_grad;
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
  take_unreduced();
  const bool has_saved_grads = in_backward_ || is_reducing();
  in_backward_ = false;
  try {
    if (auto work = std::exchange(custom_work_, {})) work.wait();
  } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch): the first error is reported
  }
  custom_input_.reset();
  discard(reduced_, in_flight_ == InFlight::AllReduce ? group_.replicate_group() : group_.shard_group());
  in_flight_ = InFlight::None;
  free_unsharded_grads();
  deferred_all_reduce_.reset();
  has_unsharded_passes_ = has_deferred_passes_ = false;
  std::fill(ready_.begin(), ready_.end(), 0);
  std::fill(deferred_.begin(), deferred_.end(), 0);
  if (has_saved_grads) restore_saved_grads();
}

}  // namespace tessera::data_parallel::fsdp
