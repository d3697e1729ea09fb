#include "tessera/data_parallel/fsdp/detail/engine/param_group.h"

#include "tessera/base/error.h"
#include "tessera/comm/detail/collective_label.h"
#include "tessera/comm/functional_collectives.h"
#include "tessera/comm/detail/runs_ops.h"
#include "tessera/data_parallel/detail/local_gradient.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/register.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/as_strided.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/zeros.h>
#include <c10/core/StreamGuard.h>

#include <algorithm>

namespace tessera::data_parallel::fsdp {
namespace {

bool lies_in(const at::Tensor& handle, const at::Tensor& shard) {
  return shard.defined() && is_dtensor(handle) &&
         tessera::detail::local_of(handle).storage().unsafeGetStorageImpl() == shard.storage().unsafeGetStorageImpl();
}

// A weak pointer of one kind or another, by version of LibTorch.
template <class Weak, class Strong>
void set_accumulator(void (*set)(const at::Tensor&, Weak), const at::Tensor& leaf, const Strong& accumulator) {
  set(leaf, Weak(accumulator));
}

SpecRef on_device(const TensorSpec& spec, c10::Device device) {
  return intern(spec.mesh, spec.placements, spec.sizes, spec.strides, spec.dtype, device);
}

}  // namespace

Unit::Unit(std::string name, std::vector<Member> members, ShardLayout layout, comm::Group shards, comm::Group replicas,
           UnitOptions options)
    : name_(std::move(name)),
      members_(std::move(members)),
      layout_(std::move(layout)),
      shards_(std::move(shards)),
      replicas_(std::move(replicas)),
      options_(options),
      accumulators_(members_.size()),
      gradients_(members_.size()),
      came_(members_.size(), 0),
      owes_(members_.size(), 0),
      aside_(members_.size()) {
  tessera::detail::register_kernels();
  packer_ = std::make_shared<Packer>(Packer{Packs::Some, [this](const at::Tensor& t) { return keep(t); }});
  if (members_.empty()) return;
  const at::NoGradGuard no_grad;
  const auto& first = local_value(members_[0].handle);
  if (first.is_meta() && members_[0].sharded) {  // take_values() will find them when they are there
    device_ = members_[0].sharded->device;
    for (auto& [name, handle, outer, sharded] : members_) {
      const auto spec = on_device(*sharded, at::kMeta);
      handle.set_data(tessera::detail::wrap(tessera::detail::local_without_storage(local_value(handle), *spec), spec));
    }
  } else {
    device_ = first.device();
    auto shard = at::zeros({layout_.shard_numel()},
                           first.options().requires_grad(false).device(options_.offload ? at::kCPU : device_));
    bool trainable = false;
    for (size_t i = 0; i < members_.size(); i++) {
      layout_.put(i, local_value(members_[i].handle).detach(), shards_->rank(), shard);
      trainable |= members_[i].handle.requires_grad();
    }
    flat_ = shard.requires_grad_(trainable);
    show_sharded();
  }
  for (size_t i = 0; i < members_.size(); i++) {
    const auto& handle = members_[i].handle;
    if (!handle.requires_grad()) continue;
    // Before the gradient is added to .grad: that must be empty, or of the same form.
    const auto before = handle.register_hook([this](const at::Tensor&) { on_need_(/*values=*/false); });
    handles_.emplace_back([handle, before] { handle.remove_hook(before); });
    handles_.push_back(register_post_accumulate_grad_hook(handle, [this, i](const at::Tensor&) { gradient_came(i); }));
  }
}

Unit::~Unit() {
  for (auto& handle : handles_) handle.remove();
}

void Unit::place(Place place) {
  name_ = std::move(place.name);
  number_ = place.number;
  streams_ = place.streams;
  arena_ = std::move(place.arena);
}

// Values that were put beside the shard since (materialize, loading by set_data, another dtype) come into it.
void Unit::take_values() {
  const auto& first = members_[0].handle;
  for (const auto& [name, handle, outer, sharded] : members_) {
    TESSERA_CHECK(is_dtensor(handle) && DTensor(handle).placements() == PlacementsRef(sharded->placements) &&
                      DTensor(handle).device_mesh() == sharded->mesh &&
                      handle.sizes() == at::IntArrayRef(sharded->sizes),
                  UsageError, "parameter ", name, " of unit ", name_, " was ", sharded->describe(),
                  " when it was sharded, and is not any more; change values, not layouts");
    TESSERA_CHECK(!handle.is_meta(), UsageError, "parameter ", name, " of unit ", name_,
                  " has no values: call materialize(model) before the first forward");
    TESSERA_CHECK(handle.scalar_type() == first.scalar_type(), UsageError, "parameter ", name, " of unit ", name_,
                  " is ", handle.scalar_type(), " and ", members_[0].name, " is ", first.scalar_type(),
                  "; a unit has one dtype");
  }
  auto shard = flat_;
  const bool fresh = !flat_.defined() || flat_.scalar_type() != first.scalar_type();
  if (fresh)
    shard = at::zeros({layout_.shard_numel()}, tessera::detail::local_of(first).options().requires_grad(false));
  bool trainable = false;
  for (size_t i = 0; i < members_.size(); i++) {
    auto& [name, handle, outer, sharded] = members_[i];
    trainable |= handle.requires_grad();
    sharded = tessera::detail::meta_of(handle).spec;
    if (!fresh && lies_in(handle, flat_)) continue;
    const auto at = layout_.in_shard(i, shards_->rank());
    const auto& piece = tessera::detail::local_of(handle);
    shard.narrow(0, at.begin, at.size).view(piece.sizes()).copy_(piece);
  }
  flat_ = shard.requires_grad_(trainable);
  part_.reset();
  show_sharded();
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
  auto piece = layout_.piece(i, shards_->rank(), shard);
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

bool Unit::is_moved() const {
  return !open_ && !members_.empty() && members_[0].sharded &&
         !std::all_of(members_.begin(), members_.end(),
                      [&](const Member& member) { return lies_in(member.handle, flat_); });
}

bool Unit::take_moved() {
  if (!is_moved()) return false;
  const at::NoGradGuard no_grad;
  let_go();
  take_values();
  return true;
}

void Unit::gather() {
  if (open_ || members_.empty()) return;
  const at::NoGradGuard no_grad;
  if (!take_moved() && is_stale()) let_go();
  if (is_gathered()) return;
  drop_gradient();
  gathered_version_ = version();
  const c10::OptionalStreamGuard stream(streams_.gather);
  if (part_.defined() && part_version_ == gathered_version_) {
    wire_ = part_;
    gathered_from_ = few_;
  } else {
    part_.reset();
    wire_ = flat_.tensor_data();  // no op: in a compiled step the shard is not one of the leaves
    wire_ = wire_.to(wire_.options().device(device_).dtype(whole_dtype()),
                     /*non_blocking=*/false, /*copy=*/options_.offload && shards_->size() == 1);
    gathered_from_ = shards_;
  }
  if (gathered_from_->size() == 1) {
    gathered_ = wire_;
    return;
  }
  const auto& layout = gathered_layout();
  if (!arena_) arena_ = std::make_shared<Arena>();
  gathered_ = arena_->take(layout.gathered_numel(), wire_.options());
  if (layout.landing_numel() > 0) landing_ = at::empty({layout.landing_numel()}, wire_.options());
  std::vector<at::Tensor> into{gathered_};
  if (landing_.defined()) into.push_back(landing_);
  const comm::Label label(name_.c_str(), number_);
  comm::all_gather_into_runs_(into, wire_, layout.gather_runs(), gathered_from_);
}

void Unit::wait_for_gathered() {
  funcol::wait(gathered_, gathered_from_);
  if (landing_.defined()) funcol::wait(landing_, gathered_from_);
}

void Unit::land() {
  if (std::exchange(landed_, true)) return;
  wait_for_gathered();
  wire_.reset();
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  gathered_layout().leave_landing(landing_, gathered_);
  landing_.reset();
}

void Unit::open() {
  if (open_ || members_.empty()) return;
  gather();
  const at::NoGradGuard no_grad;
  land();
  open_ = true;
  versions_.resize(members_.size());
  for (size_t i = 0; i < members_.size(); i++) show_whole(i, gathered_layout().whole(i, gathered_));
}

void Unit::show_whole(size_t i, const at::Tensor& whole) {
  auto& handle = members_[i].handle;
  const auto& sharded = local_value(handle);
  const bool other_kind = whole.scalar_type() != sharded.scalar_type() || whole.device() != sharded.device();
  handle.set_data(whole_form(i, whole));
  versions_[i] = static_cast<uint32_t>(handle._version());
  // set_data to another dtype or device makes autograd forget where gradients go, and a graph of before goes there
  // still.
  if (!other_kind || !handle.requires_grad()) return;
  auto& accumulator = accumulators_[i];
  if (accumulator)
    set_accumulator(&torch::autograd::impl::set_grad_accumulator, handle, accumulator);
  else
    accumulator = torch::autograd::impl::grad_accumulator(handle);
}

void Unit::show_sharded() {
  for (size_t i = 0; i < members_.size(); i++) members_[i].handle.set_data(sharded_form(i, flat_));
  open_ = false;
}

void Unit::let_go() {
  if (gathered_.defined() && !landed_) wait_for_gathered();
  gathered_.reset();
  landing_.reset();
  wire_.reset();
  landed_ = false;
}

void Unit::hide() {
  if (!open_) return;
  const at::NoGradGuard no_grad;
  std::string written;
  for (size_t i = 0; i < members_.size(); i++)
    if (static_cast<uint32_t>(members_[i].handle._version()) != versions_[i] && !computes_in_shard())
      written = members_[i].name;
  show_sharded();
  if (written.empty()) return;
  let_go();
  TESSERA_FAIL(UsageError, "parameter ", written, " of unit ", name_,
               " was written to while it was whole, and the write is lost; write inside of summon_full_params()");
}

void Unit::close() {
  part_.reset();
  if (!is_gathered()) return;
  hide();
  let_go();
}

void Unit::close_keeping_part(const comm::Group& few) {
  if (!open_) return close();
  if (few_ != few) {
    std::vector<Extent> extents;
    for (size_t i = 0; i < members_.size(); i++)
      extents.push_back({local_value(members_[i].handle).sizes().vec(), layout_.dim(i)});
    few_layout_ = ShardLayout::per_parameter(std::move(extents), few->size());
    few_ = few;
  }
  const at::NoGradGuard no_grad;
  auto part = at::zeros({few_layout_->shard_numel()}, gathered_.options());
  for (size_t i = 0; i < members_.size(); i++)
    few_layout_->put(i, gathered_layout().whole(i, gathered_), few_->rank(), part);
  close();
  part_ = std::move(part);
  part_version_ = version();
}

int64_t Unit::version() const {
  int64_t version = flat_.defined() ? flat_._version() : 0;
  for (const auto& member : members_) version += member.handle._version();
  return version;
}

Unpack Unit::keep(const at::Tensor& saved) {
  if (!open_) return {};
  const bool distributed = is_dtensor(saved);
  const auto& local = distributed ? tessera::detail::local_of(saved) : saved;
  if (!local.has_storage() || !local.is_alias_of(gathered_)) return {};
  SpecRef spec = distributed ? tessera::detail::meta_of(saved).spec : SpecRef();
  return [self = shared_from_this(), spec, sizes = local.sizes().vec(), strides = local.strides().vec(),
          offset = local.storage_offset(), version = version()] {
    const at::NoGradGuard no_grad;
    self->on_need_(/*values=*/true);
    TESSERA_CHECK(self->version() == version, UsageError, "a parameter of unit ", self->name_,
                  " was modified between the forward and the backward that needs its old value");
    self->open();
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    auto view = at::as_strided(self->gathered_, sizes, strides, offset);
    return spec ? tessera::detail::wrap(std::move(view), spec) : view;
  };
}

}  // namespace tessera::data_parallel::fsdp
