// The way of a unit's gradients: each comes whole, all are reduced in one buffer, and pieces are shown.
#include "tessera/tracing/detail/compiling_scope.h"
#include "tessera/base/error.h"
#include "tessera/comm/detail/inplace_ops.h"
#include "tessera/comm/detail/collective_label.h"
#include "tessera/comm/functional_collectives.h"
#include "tessera/comm/detail/runs_ops.h"
#include "tessera/data_parallel/fsdp/detail/engine/param_group.h"
#include "tessera/data_parallel/detail/local_gradient.h"
#include "tessera/dtensor/dtensor.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/StreamGuard.h>

#include <algorithm>

namespace tessera::data_parallel::fsdp {
namespace {

// Takes from the wire what an error has made useless. That it cannot be had any more is no further error.
void discard(at::Tensor& x, const comm::Group& group) {
  try {
    if (x.defined() && group) funcol::wait(x, group);
  } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch)
  }
  x.reset();
}

}  // namespace

double Unit::divide_by() const {
  const auto ranks = shards_->size() * (replicas_ ? replicas_->size() : 1);
  return divide_factor_.value_or(static_cast<double>(ranks));
}

// The mean is a sum, divided. Float16 has little room above: as PyTorch does, it is divided before the sum and after
// it, so that neither end overflows. By a power of two: elsewhere it is the same number, and needs no pass over them
// all.
double Unit::before_sum(c10::ScalarType dtype) const {
  double factor = 1;
  if (dtype == c10::ScalarType::Half)
    while (divide_by() / factor > factor) factor *= 2;
  return factor;
}

void Unit::begin_backward(std::function<void()> on_complete) {
  in_backward_ = true;
  on_complete_ = std::move(on_complete);
  missing_ = 0;
  for (size_t i = 0; i < members_.size(); i++) {
    auto& handle = members_[i].handle;
    aside_[i] = std::exchange(handle.mutable_grad(), {});
    missing_ += handle.requires_grad() && will_accumulate(handle);
  }
}

void Unit::gradient_came(size_t i) {
  if (!in_backward_) return;  // nobody runs this unit
  const at::NoGradGuard no_grad;
  auto& [name, handle, outer, sharded] = members_[i];
  if (sharded && is_dtensor(handle.grad()) && DTensor(handle.grad()).device_mesh() == sharded->mesh) {
    // It was used as it lies, in a penalty on parameters say: the piece is this rank's already.
    auto piece = std::exchange(handle.mutable_grad(), {});
    aside_[i] = aside_[i].defined() ? aside_[i].add_(piece) : DTensor(piece).redistribute(sharded->placements);
  } else {
    const auto gradient = local_gradient(handle.grad(), outer, name);
    auto ordered = layout_.in_order(i, gradient.to(options_.reduce_dtype.value_or(gradient.scalar_type())));
    if (const double factor = before_sum(ordered.scalar_type()); factor != 1) ordered = ordered.div(factor);
    if (came_[i])
      gradients_[i].add_(ordered);
    else
      gradients_[i] = std::move(ordered);
    came_[i] = true;
    handle.mutable_grad().reset();
  }
  if (missing_ > 0 && --missing_ == 0) on_complete_();
}

bool Unit::any_came() const { return std::find(came_.begin(), came_.end(), 1) != came_.end(); }

void Unit::let_go_of_gradients() { std::fill(gradients_.begin(), gradients_.end(), at::Tensor()); }

void Unit::post_reduction(bool all_reduce) {
  in_backward_ = false;
  all_reduce_ = all_reduce;
  if (!any_came()) return show_gradients();
  const at::NoGradGuard no_grad;
  const c10::OptionalStreamGuard stream(streams_.reduce);
  at::TensorOptions options;
  for (const auto& gradient : gradients_)
    if (gradient.defined()) options = gradient.options();
  on_wire_ = Wire::Shards;
  if (shards_->size() == 1) {
    reduced_ = at::zeros({layout_.shard_numel()}, options);
    for (size_t i = 0; i < members_.size(); i++)
      if (came_[i]) layout_.whole(i, reduced_).copy_(std::exchange(gradients_[i], {}));
    return;
  }
  reduced_ = at::empty({layout_.shard_numel()}, options);
  for (auto& gradient : gradients_)
    if (!gradient.defined()) gradient = at::empty({0}, options);  // its runs are padding
  const comm::Label label(name_.c_str(), number_);
  comm::reduce_scatter_runs_into_(reduced_, gradients_, layout_.gradient_runs(came_), ReduceOp::Sum, shards_);
}

void Unit::post_all_reduce() {
  if (on_wire_ != Wire::Shards) return;
  const at::NoGradGuard no_grad;
  const c10::OptionalStreamGuard stream(streams_.reduce);
  funcol::wait(reduced_, shards_);
  let_go_of_gradients();
  on_wire_ = Wire::None;
  if (!replicas_ || replicas_->size() == 1 || !all_reduce_) return;
  if (owed_.defined()) reduced_.add_(std::exchange(owed_, {}));
  on_wire_ = Wire::Replicas;
  const comm::Label label(name_.c_str(), number_);
  comm::all_reduce_(reduced_, ReduceOp::Sum, replicas_);
}

void Unit::finish_reduction() {
  if (!reduced_.defined()) return;
  const at::NoGradGuard no_grad;
  post_all_reduce();
  if (on_wire_ == Wire::Replicas) funcol::wait(reduced_, replicas_);
  on_wire_ = Wire::None;
  auto reduced = std::exchange(reduced_, {});
  for (size_t i = 0; i < members_.size(); i++) owes_[i] |= std::exchange(came_[i], 0);
  if (!all_reduce_ && replicas_) {
    owed_ = owed_.defined() ? owed_.add_(reduced) : reduced;
    return show_gradients();
  }
  const double after = divide_by() / before_sum(reduced.scalar_type());
  if (after != 1) reduced.div_(after);
  const auto dtype = options_.keep_low_precision_grads ? reduced.scalar_type() : flat_.scalar_type();
  const auto shard = reduced.to(flat_.options().requires_grad(false).dtype(dtype));
  add_gradients_aside(shard);
  show_gradients();
}

// A program adds where gradients are, so that they are there in the next step, too. Not if some were not there yet.
bool Unit::add_to_gradients_aside(const at::Tensor& shard) {
  const auto same_kind = [&](const at::Tensor& t) { return t.defined() && t.scalar_type() == shard.scalar_type(); };
  if (options_.flat_parameter) {
    if (!same_kind(flat_.grad())) return false;
    flat_.grad().add_(shard);
    std::fill(owes_.begin(), owes_.end(), 0);
    return true;
  }
  const auto here = [&](size_t i) { return owes_[i] && layout_.in_shard(i, shards_->rank()).size > 0; };
  for (size_t i = 0; i < members_.size(); i++)
    if (here(i) && !same_kind(aside_[i])) return false;
  for (size_t i = 0; i < members_.size(); i++) {
    if (here(i)) local_value(aside_[i]).add_(layout_.piece(i, shards_->rank(), shard));
    owes_[i] = 0;
  }
  return true;
}

void Unit::add_gradients_aside(const at::Tensor& shard) {
  if (compiling() && add_to_gradients_aside(shard)) return;
  const auto rank = shards_->rank();
  for (size_t i = 0; i < members_.size(); i++)
    if (aside_[i].defined()) layout_.piece(i, rank, shard).add_(local_value(aside_[i]));
  if (options_.flat_parameter && flat_.grad().defined()) shard.add_(flat_.grad());
  flat_.mutable_grad() = shard;
  for (size_t i = 0; i < members_.size(); i++) {
    const bool came = std::exchange(owes_[i], 0);
    const bool here = layout_.in_shard(i, rank).size > 0 || members_[i].sharded;
    if (!options_.flat_parameter && (came || aside_[i].defined()) && here) aside_[i] = sharded_form(i, shard);
  }
}

void Unit::show_gradients() {
  for (size_t i = 0; i < members_.size(); i++) members_[i].handle.mutable_grad() = std::exchange(aside_[i], {});
}

// Members' gradients are views of the shard's. When zero_grad() has let go of them all, nobody wants it.
void Unit::drop_gradient() {
  if (options_.flat_parameter || !flat_.grad().defined()) return;
  const auto has_gradient = [](const Member& member) { return member.handle.grad().defined(); };
  if (std::none_of(members_.begin(), members_.end(), has_gradient)) flat_.mutable_grad().reset();
}

void Unit::end_backward() {
  in_backward_ = false;
  show_gradients();
}

Unit::Carried Unit::carried() const { return {gradients_, came_, owed_, owes_, divide_factor_}; }

void Unit::carry(const Carried& state) {
  gradients_ = state.gradients;
  came_ = state.came;
  owed_ = state.owed;
  owes_ = state.owes;
  divide_factor_ = state.divide_factor;
}

void Unit::find_shard_gradient() {
  if (!flat_.defined() || options_.flat_parameter) return;  // that one has its gradient as other parameters do
  at::Tensor shard;
  for (size_t i = 0; i < members_.size(); i++) {
    const auto& gradient = members_[i].handle.grad();
    const auto place = layout_.in_shard(i, shards_->rank());
    if (!gradient.defined() || place.size == 0) continue;
    const auto& piece = local_value(gradient);
    if (!shard.defined()) shard = layout_.shard_around(i, shards_->rank(), piece);
    if (!shard.defined() || !shard.is_alias_of(piece) || piece.storage_offset() != shard.storage_offset() + place.begin)
      return flat_.mutable_grad().reset();
  }
  flat_.mutable_grad() = shard;
}

void Unit::abandon() {
  const bool hides_gradients = in_backward_ || reducing();
  in_backward_ = false;
  discard(reduced_, on_wire_ == Wire::Replicas ? replicas_ : shards_);
  on_wire_ = Wire::None;
  if (!landed_) {
    discard(gathered_, gathered_from_);
    discard(landing_, gathered_from_);
  }
  let_go_of_gradients();
  owed_.reset();
  std::fill(came_.begin(), came_.end(), 0);
  std::fill(owes_.begin(), owes_.end(), 0);
  if (hides_gradients) show_gradients();
  settle_writes(false);
  close();
  let_go();
}

}  // namespace tessera::data_parallel::fsdp
