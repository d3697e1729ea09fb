#include "tessera/data_parallel/fsdp/unit.h"

#include "tessera/base/error.h"
#include "tessera/comm/inplace_ops.h"
#include "tessera/comm/label.h"
#include "tessera/comm/ops.h"
#include "tessera/data_parallel/local_gradient.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/register.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/as_strided.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

namespace tessera::data_parallel::fsdp {
namespace {

std::vector<int64_t> sizes_of(const at::Tensor& t) { return t.sizes().vec(); }

}  // namespace

Unit::Unit(std::string name, std::vector<Member> members, ShardLayout layout, comm::Group shards, comm::Group replicas,
           UnitOptions options)
    : name_(std::move(name)),
      members_(std::move(members)),
      layout_(std::move(layout)),
      shards_(std::move(shards)),
      replicas_(std::move(replicas)),
      options_(options),
      gradients_(members_.size()),
      came_(members_.size(), 0),
      aside_(members_.size()) {
  tessera::detail::register_kernels();
  packer_ = std::make_shared<Packer>(Packer{Claims::Some, [this](const at::Tensor& t) { return keep(t); }});
  if (members_.empty()) return;
  const at::NoGradGuard no_grad;
  const auto& first = local_value(members_[0].handle);
  auto shard = at::zeros({layout_.shard_numel()}, first.options().requires_grad(false));
  for (size_t i = 0; i < members_.size(); i++) copy_piece(i, local_value(members_[i].handle).detach(), shard);
  bool trainable = false;
  for (const auto& member : members_) trainable |= member.handle.requires_grad();
  flat_ = shard.requires_grad_(trainable);
  for (size_t i = 0; i < members_.size(); i++) {
    members_[i].handle.set_data(sharded_form(i, flat_));
    if (members_[i].handle.requires_grad())
      handles_.push_back(
          register_post_accumulate_grad_hook(members_[i].handle, [this, i](const at::Tensor&) { gradient_came(i); }));
  }
}

Unit::~Unit() {
  for (auto& handle : handles_) handle.remove();
}

void Unit::copy_piece(size_t i, const at::Tensor& whole, const at::Tensor& shard) const {
  const auto place = layout_.in_shard(i, shards_->rank());
  const auto part = layout_.in_parameter(i, shards_->rank());
  if (place.size == 0) return;
  const auto piece = layout_.is_flat() ? whole.reshape({-1}).narrow(0, part.begin, part.size)
                                       : whole.narrow(layout_.dim(i), part.begin, part.size);
  shard.narrow(0, place.begin, place.size).view(layout_.piece_sizes(i, shards_->rank())).copy_(piece);
}

void Unit::settle_writes(bool keep) {
  if (!open_) return;
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < members_.size(); i++) {
    if (keep && shards_->size() > 1) copy_piece(i, local_value(members_[i].handle).detach(), flat_);
    versions_[i] = static_cast<uint32_t>(members_[i].handle._version());
  }
}

at::Tensor Unit::sharded_form(size_t i, const at::Tensor& shard) const {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const auto place = layout_.in_shard(i, shards_->rank());
  auto piece = shard.narrow(0, place.begin, place.size).view(layout_.piece_sizes(i, shards_->rank()));
  return members_[i].sharded ? tessera::detail::wrap(std::move(piece), members_[i].sharded) : piece;
}

at::Tensor Unit::whole_form(size_t i, const at::Tensor& view) const {
  if (!members_[i].outer) return view;
  const auto& outer = *members_[i].outer;
  const auto spec = view.scalar_type() == outer.dtype ? members_[i].outer
                                                      : intern(outer.mesh, outer.placements, outer.sizes, outer.strides,
                                                               view.scalar_type(), outer.device);
  return tessera::detail::wrap(view, spec);
}

void Unit::gather() {
  if (is_gathered() || members_.empty()) return;
  const at::NoGradGuard no_grad;
  wire_ = flat_.detach();
  if (options_.param_dtype) wire_ = wire_.to(*options_.param_dtype);
  if (shards_->size() == 1) {
    gathered_ = wire_;
    return;
  }
  if (!arena_) arena_ = std::make_shared<Arena>();
  gathered_ = arena_->take(layout_.gathered_numel(), wire_.options());
  if (layout_.landing_numel() > 0) landing_ = at::empty({layout_.landing_numel()}, wire_.options());
  const comm::Label label(name_.c_str(), 0);
  Tensors into{gathered_};
  if (landing_.defined()) into.push_back(landing_);
  shards_->add_pending(gathered_, comm::all_gather_into_runs(shards_, into, layout_.gather_runs(), wire_));
}

void Unit::open() {
  if (open_ || members_.empty()) return;
  gather();
  const at::NoGradGuard no_grad;
  comm::wait(gathered_, shards_);
  wire_.reset();
  versions_.clear();
  Tensors wholes;
  {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    layout_.leave_landing(landing_, gathered_);
    landing_.reset();
    for (size_t i = 0; i < members_.size(); i++) wholes.push_back(layout_.whole(i, gathered_));
  }
  for (size_t i = 0; i < members_.size(); i++) {
    members_[i].handle.set_data(whole_form(i, wholes[i]));
    versions_.push_back(static_cast<uint32_t>(members_[i].handle._version()));
  }
  open_ = true;
}

void Unit::close() {
  if (!is_gathered()) return;
  const at::NoGradGuard no_grad;
  std::string written;
  if (open_) {
    for (size_t i = 0; i < members_.size(); i++) {
      auto& handle = members_[i].handle;
      if (static_cast<uint32_t>(handle._version()) != versions_[i] && shards_->size() > 1) written = members_[i].name;
      handle.set_data(sharded_form(i, flat_));
    }
  } else {
    comm::wait(gathered_, shards_);
  }
  gathered_.reset();
  landing_.reset();
  wire_.reset();
  open_ = false;
  TESSERA_CHECK(written.empty(), UsageError, "parameter ", written, " of unit ", name_,
                " was written to while it was whole, and the write is lost; write inside of summon_full_params()");
}

int64_t Unit::version() const {
  int64_t version = flat_._version();
  for (const auto& member : members_) version += member.handle._version();
  return version;
}

Unpack Unit::keep(const at::Tensor& saved) {
  if (!open_) return {};
  const bool distributed = is_dtensor(saved);
  const auto& local = distributed ? tessera::detail::local_of(saved) : saved;
  if (!local.has_storage() || !local.is_alias_of(gathered_)) return {};
  SpecRef spec = distributed ? tessera::detail::meta_of(saved).spec : SpecRef();
  return [self = shared_from_this(), spec, sizes = sizes_of(local), strides = local.strides().vec(),
          offset = local.storage_offset(), version = version()] {
    const at::NoGradGuard no_grad;
    self->on_need_();
    TESSERA_CHECK(self->version() == version, UsageError, "a parameter of unit ", self->name_,
                  " was modified between the forward and the backward that needs its old value");
    self->open();
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    auto view = at::as_strided(self->gathered_, sizes, strides, offset);
    return spec ? tessera::detail::wrap(std::move(view), spec) : view;
  };
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
  const at::NoGradGuard no_grad;
  if (!in_backward_) {  // nothing announced it: an output that nobody saw
    const auto gradient = std::exchange(members_[i].handle.mutable_grad(), {});
    on_need_();
    missing_++;
    members_[i].handle.mutable_grad() = gradient;
  }
  auto& handle = members_[i].handle;
  {
    const auto& gradient = local_gradient(handle, members_[i].name);
    auto ordered = layout_.in_order(i, gradient.to(options_.reduce_dtype.value_or(gradient.scalar_type())));
    if (const double factor = before_sum(ordered.scalar_type()); factor != 1) ordered = ordered.div(factor);
    if (came_[i])
      gradients_[i].add_(ordered);
    else
      gradients_[i] = std::move(ordered);
  }
  came_[i] = true;
  handle.mutable_grad().reset();
  if (--missing_ == 0) on_complete_();
}

bool Unit::any_came() const { return std::find(came_.begin(), came_.end(), 1) != came_.end(); }

int64_t Unit::all_ranks() const { return shards_->size() * (replicas_ ? replicas_->size() : 1); }

// The mean is a sum, divided. Float16 has little room above: as PyTorch does, it is divided before the sum and after
// it, so that neither end overflows. By a power of two: elsewhere it is the same number, and needs no pass over them
// all.
double Unit::before_sum(c10::ScalarType dtype) const {
  double factor = 1;
  if (dtype == c10::ScalarType::Half)
    while (static_cast<double>(all_ranks()) / factor > factor) factor *= 2;
  return factor;
}

void Unit::post_reduction() {
  in_backward_ = false;
  if (!any_came()) return show_gradients();
  const at::NoGradGuard no_grad;
  at::TensorOptions options;
  for (const auto& gradient : gradients_)
    if (gradient.defined()) options = gradient.options();
  if (shards_->size() == 1) {
    reduced_ = at::zeros({layout_.shard_numel()}, options);
    for (size_t i = 0; i < members_.size(); i++)
      if (came_[i]) copy_piece(i, std::exchange(gradients_[i], {}), reduced_);
    return;
  }
  reduced_ = at::empty({layout_.shard_numel()}, options);
  for (auto& gradient : gradients_)
    if (!gradient.defined()) gradient = at::empty({0}, options);  // its runs are padding
  const comm::Label label(name_.c_str(), 0);
  shards_->add_pending(
      reduced_, comm::reduce_scatter_runs(shards_, reduced_, gradients_, layout_.gradient_runs(came_), ReduceOp::Sum));
}

void Unit::finish_reduction() {
  if (!reduced_.defined()) return;
  const at::NoGradGuard no_grad;
  comm::wait(reduced_, shards_);
  std::fill(gradients_.begin(), gradients_.end(), at::Tensor());
  if (replicas_ && replicas_->size() > 1) {
    comm::all_reduce_(reduced_, ReduceOp::Sum, replicas_);
    comm::wait(reduced_, replicas_);
  }
  const double after = static_cast<double>(all_ranks()) / before_sum(reduced_.scalar_type());
  if (after != 1) reduced_.div_(after);
  auto shard = std::exchange(reduced_, {}).to(flat_.scalar_type());
  for (size_t i = 0; i < members_.size(); i++) {
    if (!aside_[i].defined()) continue;
    const auto place = layout_.in_shard(i, shards_->rank());
    shard.narrow(0, place.begin, place.size)
        .view(layout_.piece_sizes(i, shards_->rank()))
        .add_(local_of_gradient(aside_[i]));
  }
  if (options_.flat_parameter && flat_.grad().defined()) shard.add_(flat_.grad());
  flat_.mutable_grad() = shard;
  if (!options_.flat_parameter)
    for (size_t i = 0; i < members_.size(); i++) {
      const bool here = layout_.in_shard(i, shards_->rank()).size > 0 || members_[i].sharded;
      if ((came_[i] || aside_[i].defined()) && here) aside_[i] = sharded_form(i, shard);
    }
  std::fill(came_.begin(), came_.end(), 0);
  show_gradients();
}

const at::Tensor& Unit::local_of_gradient(const at::Tensor& gradient) const {
  return is_dtensor(gradient) ? tessera::detail::local_of(gradient) : gradient;
}

void Unit::show_gradients() {
  for (size_t i = 0; i < members_.size(); i++) members_[i].handle.mutable_grad() = std::exchange(aside_[i], {});
}

void Unit::end_backward() {
  in_backward_ = false;
  show_gradients();
}

void Unit::abandon() {
  if (in_backward_) end_backward();
  std::fill(gradients_.begin(), gradients_.end(), at::Tensor());
  reduced_.reset();
  std::fill(came_.begin(), came_.end(), 0);
  settle_writes(false);
  close();
}

}  // namespace tessera::data_parallel::fsdp
