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
#include <ATen/ops/equal.h>
#include <ATen/ops/zeros.h>

#include <numeric>

namespace tessera::data_parallel::fsdp {
namespace {

// PyTorch's split of the mean: divided before the sum and after it, so that neither half-precision end overflows.
double before_sum(int64_t ranks) {
  double factor = 1;
  while (static_cast<double>(ranks) / factor > factor) factor *= 2;
  return factor;
}

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
      came_(members_.size(), 0),
      aside_(members_.size()) {
  tessera::detail::register_kernels();
  packer_ = std::make_shared<Packer>(Packer{Claims::Some, [this](const at::Tensor& t) { return keep(t); }});
  if (members_.empty()) return;
  const at::NoGradGuard no_grad;
  const auto& first = local_value(members_[0].handle);
  device_ = first.device();
  auto shard_options = first.options().requires_grad(false);
  if (options_.offload) shard_options = shard_options.device(at::kCPU).pinned_memory(!device_.is_cpu());
  auto shard = at::zeros({layout_.shard_numel()}, shard_options);
  for (size_t i = 0; i < members_.size(); i++)
    layout_.put(i, local_value(members_[i].handle).detach(), shards_->rank(), shard);
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

void Unit::settle_writes(bool keep) {
  if (!open_) return;
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < members_.size(); i++) {
    const auto place = layout_.in_shard(i, shards_->rank());
    if (keep && !computes_in_shard() && place.size > 0) {
      // What did not change is not written: backward may still need the shard as it was.
      const auto piece = layout_.cut(i, local_value(members_[i].handle).detach(), shards_->rank());
      const auto kept = flat_.narrow(0, place.begin, place.size).view(piece.sizes());
      if (!at::equal(piece.to(kept.options()), kept)) kept.copy_(piece);
    }
    versions_[i] = static_cast<uint32_t>(members_[i].handle._version());
  }
}

at::Tensor Unit::sharded_form(size_t i, const at::Tensor& shard) const {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const auto place = layout_.in_shard(i, shards_->rank());
  auto piece = shard.narrow(0, place.begin, place.size).view(layout_.piece_sizes(i, shards_->rank()));
  if (layout_.is_flat() && layout_.ranks() == 1) return whole_form(i, piece);  // not cut: it keeps its shape
  return members_[i].sharded ? tessera::detail::wrap(std::move(piece), members_[i].sharded) : piece;
}

at::Tensor Unit::whole_form(size_t i, const at::Tensor& view) const {
  if (!members_[i].outer) return view;
  const auto& outer = *members_[i].outer;
  const auto spec =
      view.scalar_type() == outer.dtype && view.device() == outer.device
          ? members_[i].outer
          : intern(outer.mesh, outer.placements, outer.sizes, outer.strides, view.scalar_type(), view.device());
  return tessera::detail::wrap(view, spec);
}

c10::ScalarType Unit::whole_dtype() const {
  return full_precision_ ? flat_.scalar_type() : options_.param_dtype.value_or(flat_.scalar_type());
}

bool Unit::computes_in_shard() const {
  return shards_->size() == 1 && !options_.offload && whole_dtype() == flat_.scalar_type();
}

void Unit::gather() {
  if (is_gathered() || members_.empty()) return;
  const at::NoGradGuard no_grad;
  wire_ = flat_.detach();
  const bool only_rank = shards_->size() == 1;
  wire_ = wire_.to(device_, whole_dtype(), /*non_blocking=*/false, /*copy=*/options_.offload && only_rank);
  if (only_rank) {
    gathered_ = wire_;
    return;
  }
  gathered_ = at::empty({layout_.gathered_numel()}, wire_.options());
  const comm::Label label(name_.c_str(), 0);
  comm::all_gather_into_(gathered_, wire_, shards_);
}

void Unit::open() {
  if (open_ || members_.empty()) return;
  gather();
  const at::NoGradGuard no_grad;
  comm::wait(gathered_, shards_);
  wire_.reset();
  versions_.clear();
  {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    for (size_t i = 0; i < members_.size(); i++) wholes_.push_back(layout_.assemble(i, gathered_));
  }
  for (size_t i = 0; i < members_.size(); i++) {
    members_[i].handle.set_data(whole_form(i, wholes_[i]));
    versions_.push_back(static_cast<uint32_t>(members_[i].handle._version()));
  }
  if (!layout_.is_flat() && shards_->size() > 1) gathered_.reset();  // each has a copy
  open_ = true;
}

void Unit::close() {
  if (!is_gathered()) return;
  const at::NoGradGuard no_grad;
  std::string written;
  if (open_) {
    for (size_t i = 0; i < members_.size(); i++) {
      auto& handle = members_[i].handle;
      if (static_cast<uint32_t>(handle._version()) != versions_[i] && !computes_in_shard()) written = members_[i].name;
      handle.set_data(sharded_form(i, flat_));
    }
  } else {
    comm::wait(gathered_, shards_);
  }
  wholes_.clear();
  gathered_.reset();
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
  if (!local.has_storage()) return {};
  const auto* storage = local.storage().unsafeGetStorageImpl();
  size_t which = 0;
  while (which < wholes_.size() && wholes_[which].storage().unsafeGetStorageImpl() != storage) which++;
  if (which == wholes_.size()) return {};
  SpecRef spec = distributed ? tessera::detail::meta_of(saved).spec : SpecRef();
  return [self = shared_from_this(), which, spec, sizes = sizes_of(local), strides = local.strides().vec(),
          offset = local.storage_offset(), version = version()] {
    const at::NoGradGuard no_grad;
    self->on_need_();
    TESSERA_CHECK(self->version() == version, UsageError, "a parameter of unit ", self->name_,
                  " was modified between the forward and the backward that needs its old value");
    self->open();
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    auto view = at::as_strided(self->wholes_[which], sizes, strides, offset);
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
  const auto& gradient = local_gradient(handle, members_[i].name);
  if (!gradients_.defined()) {
    const auto options = gradient.options().dtype(options_.reduce_dtype.value_or(gradient.scalar_type()));
    const bool all = !layout_.has_padding() && missing_ == members_.size();
    gradients_ = all ? at::empty({layout_.gathered_numel()}, options) : at::zeros({layout_.gathered_numel()}, options);
  }
  layout_.scatter(i, gradient, gradients_, 1 / before_sum(all_ranks()), came_[i]);
  came_[i] = true;
  handle.mutable_grad().reset();
  if (--missing_ == 0) on_complete_();
}

int64_t Unit::all_ranks() const { return shards_->size() * (replicas_ ? replicas_->size() : 1); }

void Unit::post_reduction() {
  in_backward_ = false;
  if (!gradients_.defined()) return show_gradients();
  const at::NoGradGuard no_grad;
  const comm::Label label(name_.c_str(), 0);
  if (shards_->size() == 1) {
    reduced_ = gradients_;
    return;
  }
  reduced_ = at::empty({layout_.shard_numel()}, gradients_.options());
  comm::reduce_scatter_into_(reduced_, gradients_, ReduceOp::Sum, shards_);
}

void Unit::finish_reduction() {
  if (!reduced_.defined()) return;
  const at::NoGradGuard no_grad;
  comm::wait(reduced_, shards_);
  gradients_.reset();
  if (replicas_ && replicas_->size() > 1) {
    comm::all_reduce_(reduced_, ReduceOp::Sum, replicas_);
    comm::wait(reduced_, replicas_);
  }
  const double after = static_cast<double>(all_ranks()) / before_sum(all_ranks());
  if (after != 1) reduced_.div_(after);
  const auto dtype = options_.keep_low_precision_grads ? reduced_.scalar_type() : flat_.scalar_type();
  auto shard = std::exchange(reduced_, {}).to(flat_.device(), dtype);
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
  gradients_.reset();
  reduced_.reset();
  std::fill(came_.begin(), came_.end(), 0);
  settle_writes(false);
  close();
}

}  // namespace tessera::data_parallel::fsdp
