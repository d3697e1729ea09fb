#include "tessera/data_parallel/fsdp/detail/engine/param_group.h"

#include "tessera/base/detail/same_storage.h"
#include "tessera/base/error.h"
#include "tessera/comm/detail/collective_label.h"
#include "tessera/comm/detail/segment_ops.h"
#include "tessera/comm/functional_collectives.h"
#include "tessera/data_parallel/detail/local_gradient.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/register.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/as_strided.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <c10/core/StreamGuard.h>

#include <algorithm>

namespace tessera::data_parallel::fsdp {
namespace {

bool is_view_of_shard(const at::Tensor& param, const at::Tensor& shard) {
  return shard.defined() && is_dtensor(param) &&
         tessera::detail::local_of(param).storage().unsafeGetStorageImpl() == shard.storage().unsafeGetStorageImpl();
}

// The type of the weak pointer depends on the LibTorch version.
template <class Weak, class Strong>
void set_accumulator(void (*set)(const at::Tensor&, Weak), const at::Tensor& leaf, const Strong& accumulator) {
  set(leaf, Weak(accumulator));
}

SpecRef with_device(const TensorSpec& spec, c10::Device device) {
  return intern(spec.mesh, spec.placements, spec.sizes, spec.strides, spec.dtype, device);
}

}  // namespace

at::Tensor wrap_unsharded(const FSDPParam& param, const at::Tensor& local) {
  if (!param.unsharded_spec) return local;
  const auto& spec = *param.unsharded_spec;
  const bool same = local.scalar_type() == spec.dtype && local.device() == spec.device;
  return tessera::detail::wrap(
      local, same ? param.unsharded_spec
                  : intern(spec.mesh, spec.placements, spec.sizes, spec.strides, local.scalar_type(), local.device()));
}

void discard(at::Tensor& x, const comm::Group& group) {
  try {
    if (x.defined() && group) funcol::wait(x, group);
  } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch): the first error is reported already
  }
  x.reset();
}

ParamGroup::ParamGroup(std::string name, std::vector<FSDPParam> params, ShardLayout layout, comm::Group shard_group,
                       comm::Group replicate_group, ParamGroupOptions options)
    : name_(std::move(name)),
      params_(std::move(params)),
      layout_(std::move(layout)),
      shard_group_(std::move(shard_group)),
      replicate_group_(std::move(replicate_group)),
      options_(options),
      accumulators_(params_.size()) {
  tessera::detail::register_kernels();
  packer_ = std::make_shared<Packer>(Packer{Accepts::SomeTensors, [this](const at::Tensor& t) { return pack(t); }});
  if (!params_.empty()) shard_parameters();
  gradients_ = std::make_unique<ParamGroupGradients>(*this);
}

ParamGroup::~ParamGroup() = default;

void ParamGroup::shard_parameters() {
  const at::NoGradGuard no_grad;
  const auto& first = local_or_self(params_[0].tensor);
  if (first.is_meta() && params_[0].sharded_spec) {  // copy_values_to_shard() finds the values when they exist
    device_ = params_[0].sharded_spec->device;
    for (auto& param : params_) {
      const auto spec = with_device(*param.sharded_spec, at::kMeta);
      param.tensor.set_data(
          tessera::detail::wrap(tessera::detail::local_without_storage(local_or_self(param.tensor), *spec), spec));
    }
    return;
  }
  device_ = first.device();
  auto shard = new_shard(first.options().device(options_.offload ? at::kCPU : device_));
  bool trainable = false;
  for (size_t i = 0; i < params_.size(); i++) {
    layout_.copy_to_shard(i, local_or_self(params_[i].tensor).detach(), shard_group_->rank(), shard);
    trainable |= params_[i].tensor.requires_grad();
  }
  flat_param_ = shard.requires_grad_(trainable);
  make_sharded_params();
}

bool ParamGroup::pins_shard() const { return options_.offload && options_.pin_memory && device_.is_cuda(); }

at::Tensor ParamGroup::new_shard(const at::TensorOptions& options) const {
  return at::zeros({layout_.shard_numel()}, options.requires_grad(false).pinned_memory(pins_shard()));
}

void ParamGroup::attach_to_schedule(ScheduleContext context) {
  name_ = std::move(context.name);
  index_ = context.index;
  streams_ = context.streams;
  buffer_pool_ = std::move(context.buffer_pool);
  events_ = std::move(context.events);
}

void ParamGroup::notify_before_backward(bool needs_values) {
  if (const auto events = events_.lock()) events->before_backward(*this, needs_values);
}

void ParamGroup::notify_gradients_ready() {
  if (const auto events = events_.lock()) events->gradients_ready(*this);
}

void ParamGroup::copy_values_to_shard() {
  const auto& first = params_[0].tensor;
  for (const auto& [name, tensor, unsharded_spec, sharded_spec] : params_) {
    TESSERA_CHECK(is_dtensor(tensor) && DTensor(tensor).placements() == PlacementsRef(sharded_spec->placements) &&
                      DTensor(tensor).device_mesh() == sharded_spec->mesh &&
                      tensor.sizes() == at::IntArrayRef(sharded_spec->sizes),
                  UsageError, "parameter ", name, " of parameter group ", name_, " was ", sharded_spec->describe(),
                  " when it was sharded, and now has another placement, mesh or shape; change only its values");
    TESSERA_CHECK(!tensor.is_meta(), UsageError, "parameter ", name, " of parameter group ", name_,
                  " has no values: call materialize(model) before the first forward");
    TESSERA_CHECK(tensor.scalar_type() == first.scalar_type(), UsageError, "parameter ", name, " of parameter group ",
                  name_, " is ", tensor.scalar_type(), " and ", params_[0].name, " is ", first.scalar_type(),
                  "; a parameter group has one dtype");
  }
  auto shard = flat_param_;
  const bool is_new = !flat_param_.defined() || flat_param_.scalar_type() != first.scalar_type();
  if (is_new) shard = new_shard(tessera::detail::local_of(first).options());
  bool trainable = false;
  for (size_t i = 0; i < params_.size(); i++) {
    auto& param = params_[i];
    trainable |= param.tensor.requires_grad();
    param.sharded_spec = tessera::detail::meta_of(param.tensor).spec;
    if (!is_new && is_view_of_shard(param.tensor, flat_param_)) continue;
    const auto range = layout_.range_in_shard(i, shard_group_->rank());
    const auto& local = tessera::detail::local_of(param.tensor);
    shard.narrow(0, range.begin, range.size).view(local.sizes()).copy_(local);
  }
  flat_param_ = shard.requires_grad_(trainable);
  reshard_shard_.reset();
  make_sharded_params();
}

void ParamGroup::accept_writes(bool writeback) {
  if (!unsharded_) return;
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < params_.size(); i++) {
    const auto range = layout_.range_in_shard(i, shard_group_->rank());
    // The tensor may have other memory than the buffer: a copy on the CPU, or what set_data() gave it.
    const bool aliases_shard =
        unsharded_aliases_shard() && same_storage(local_or_self(params_[i].tensor), all_gather_output_);
    if (writeback && !aliases_shard && range.size > 0) {
      // Unchanged values are not written: backward may still need this version of the shard.
      const auto local = layout_.shard_of(i, local_or_self(params_[i].tensor).detach(), shard_group_->rank());
      const auto in_shard = flat_param_.narrow(0, range.begin, range.size).view(local.sizes());
      if (!at::equal(local.to(in_shard.options()), in_shard)) in_shard.copy_(local);
    }
    unsharded_versions_[i] = static_cast<uint32_t>(params_[i].tensor._version());
  }
}

at::Tensor ParamGroup::sharded_view(size_t i, const at::Tensor& shard) const {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  auto local = layout_.param_in_shard(i, shard_group_->rank(), shard);
  if (layout_.is_flat() && layout_.ranks() == 1) return wrap_unsharded(params_[i], local);  // it keeps its shape
  return params_[i].sharded_spec ? tessera::detail::wrap(std::move(local), params_[i].sharded_spec) : local;
}

c10::ScalarType ParamGroup::unsharded_dtype() const {
  return full_precision_ ? flat_param_.scalar_type() : options_.param_dtype.value_or(flat_param_.scalar_type());
}

bool ParamGroup::unsharded_aliases_shard() const {
  return shard_group_->size() == 1 && !options_.offload && unsharded_dtype() == flat_param_.scalar_type();
}

bool ParamGroup::has_new_values() const {
  return !unsharded_ && !params_.empty() && params_[0].sharded_spec &&
         !std::all_of(params_.begin(), params_.end(),
                      [&](const FSDPParam& param) { return is_view_of_shard(param.tensor, flat_param_); });
}

bool ParamGroup::take_new_values() {
  if (!has_new_values()) return false;
  const at::NoGradGuard no_grad;
  free_buffer();
  copy_values_to_shard();
  return true;
}

void ParamGroup::unshard() {
  if (unsharded_ || params_.empty()) return;
  const at::NoGradGuard no_grad;
  if (!take_new_values() && is_stale()) free_buffer();
  if (has_unsharded_buffer()) return;
  gradients_->drop_unused_flat_param_grad();
  all_gather_version_ = version();
  const c10::OptionalStreamGuard stream(streams_.all_gather);
  if (reshard_shard_.defined() && reshard_version_ == all_gather_version_) {
    all_gather_input_ = reshard_shard_;
    all_gather_group_ = reshard_group_;
  } else {
    reshard_shard_.reset();
    all_gather_input_ = flat_param_.tensor_data();  // not an op: in a compiled step the shard is not one of the leaves
    all_gather_input_ = all_gather_input_.to(all_gather_input_.options().device(device_).dtype(unsharded_dtype()),
                                             /*non_blocking=*/pins_shard(),
                                             /*copy=*/options_.offload && shard_group_->size() == 1);
    all_gather_group_ = shard_group_;
  }
  if (all_gather_group_->size() == 1) {
    all_gather_output_ = all_gather_input_;
    return;
  }
  const auto& layout = all_gather_layout();
  if (!buffer_pool_) buffer_pool_ = std::make_shared<BufferPool>();
  all_gather_output_ = buffer_pool_->allocate(layout.gathered_numel(), all_gather_input_.options());
  if (custom_all_gather_) {
    custom_output_ = custom_all_gather_->allocate({layout.ranks() * layout.shard_numel()}, all_gather_input_.options());
    const comm::CollectiveLabel label(name_.c_str(), index_);
    custom_work_ = (*custom_all_gather_)(custom_output_, all_gather_input_, all_gather_group_, /*async_op=*/true);
    return;
  }
  if (layout.staging_numel() > 0) staging_ = at::empty({layout.staging_numel()}, all_gather_input_.options());
  std::vector<at::Tensor> outputs{all_gather_output_};
  if (staging_.defined()) outputs.push_back(staging_);
  const comm::CollectiveLabel label(name_.c_str(), index_);
  comm::all_gather_into_segments_(outputs, all_gather_input_, layout.gather_segments(), all_gather_group_);
}

void ParamGroup::wait_for_all_gather() {
  if (auto work = std::exchange(custom_work_, {})) work.wait();
  funcol::wait(all_gather_output_, all_gather_group_);
  if (staging_.defined()) funcol::wait(staging_, all_gather_group_);
}

void ParamGroup::finish_all_gather() {
  if (std::exchange(all_gather_done_, true)) return;
  wait_for_all_gather();
  all_gather_input_.reset();
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  if (custom_output_.defined()) return copy_from_custom_output();
  all_gather_layout().copy_from_staging(staging_, all_gather_output_);
  staging_.reset();
}

void ParamGroup::copy_from_custom_output() {
  const auto& layout = all_gather_layout();
  const auto output = std::exchange(custom_output_, {});
  for (int64_t rank = 0; rank < layout.ranks(); rank++) {
    const auto shard = output.narrow(0, rank * layout.shard_numel(), layout.shard_numel());
    for (size_t i = 0; i < params_.size(); i++)
      if (layout.range_in_shard(i, rank).size > 0)
        layout.shard_of(i, layout.unsharded_param(i, all_gather_output_), rank)
            .copy_(layout.param_in_shard(i, rank, shard));
  }
}

// The unflattened parameters require a gradient if the flat parameter does: only that one is in the module.
void ParamGroup::follow_flat_param() {
  if (!options_.flat_parameter) return;
  for (auto& param : params_)
    if (param.tensor.requires_grad() != flat_param_.requires_grad())
      param.tensor.requires_grad_(flat_param_.requires_grad());
}

at::Tensor ParamGroup::shard_differs_from_buffer() const {
  const at::NoGradGuard no_grad;
  const auto options = all_gather_output_.options().dtype(at::kInt);
  if (is_stale()) return at::ones({1}, options);
  const auto shard = flat_param_.detach().to(all_gather_output_.options());
  auto differs = at::zeros({1}, options);
  for (size_t i = 0; i < params_.size(); i++) {
    const auto range = layout_.range_in_shard(i, shard_group_->rank());
    if (range.size == 0) continue;
    const auto gathered =
        layout_.shard_of(i, all_gather_layout().unsharded_param(i, all_gather_output_), shard_group_->rank());
    const auto same = gathered.reshape({-1}).ne(shard.narrow(0, range.begin, range.size));
    differs.logical_or_(same.any());
  }
  return differs;
}

void ParamGroup::wait_for_unshard() {
  if (unsharded_ || params_.empty()) return;
  unshard();
  follow_flat_param();
  const at::NoGradGuard no_grad;
  finish_all_gather();
  unsharded_ = true;
  unsharded_versions_.resize(params_.size());
  for (size_t i = 0; i < params_.size(); i++)
    switch_to_unsharded(i, unsharded_aliases_shard() ? local_or_self(sharded_params_[i])
                                                     : all_gather_layout().unsharded_param(i, all_gather_output_));
}

void ParamGroup::switch_to_unsharded(size_t i, const at::Tensor& unsharded) {
  auto& tensor = params_[i].tensor;
  const auto& sharded = local_or_self(tensor);
  const bool changes_type = unsharded.scalar_type() != sharded.scalar_type() || unsharded.device() != sharded.device();
  tensor.set_data(wrap_unsharded(params_[i], unsharded));
  unsharded_versions_[i] = static_cast<uint32_t>(tensor._version());
  // set_data() to another dtype or device resets the gradient accumulator. An existing graph still refers to the old
  // accumulator, so the group keeps one and restores it.
  if (!changes_type || !tensor.requires_grad()) return;
  auto& accumulator = accumulators_[i];
  if (accumulator)
    set_accumulator(&torch::autograd::impl::set_grad_accumulator, tensor, accumulator);
  else
    accumulator = torch::autograd::impl::grad_accumulator(tensor);
}

void ParamGroup::make_sharded_params() {
  sharded_params_.clear();
  for (size_t i = 0; i < params_.size(); i++) sharded_params_.push_back(sharded_view(i, flat_param_));
  switch_to_sharded();
}

void ParamGroup::switch_to_sharded() {
  for (size_t i = 0; i < params_.size(); i++) params_[i].tensor.set_data(sharded_params_[i]);
  unsharded_ = false;
}

void ParamGroup::free_buffer() {
  if (all_gather_output_.defined() && !all_gather_done_) wait_for_all_gather();
  all_gather_output_.reset();
  staging_.reset();
  all_gather_input_.reset();
  all_gather_done_ = false;
}

void ParamGroup::reshard_keep_buffer() {
  if (!unsharded_) return;
  const at::NoGradGuard no_grad;
  std::string written;
  for (size_t i = 0; i < params_.size(); i++)
    if (static_cast<uint32_t>(params_[i].tensor._version()) != unsharded_versions_[i] && !unsharded_aliases_shard())
      written = params_[i].name;
  switch_to_sharded();
  if (written.empty()) return;
  free_buffer();
  TESSERA_FAIL(UsageError, "parameter ", written, " of parameter group ", name_,
               " was written to while it was unsharded, and the write is lost; write inside summon_full_params()");
}

void ParamGroup::reshard() {
  reshard_shard_.reset();
  if (!has_unsharded_buffer()) return;
  reshard_keep_buffer();
  free_buffer();
}

void ParamGroup::reshard_to(const comm::Group& reshard_group) {
  if (!unsharded_) return reshard();
  if (reshard_group_ != reshard_group) {
    std::vector<ParamShape> shapes;
    for (size_t i = 0; i < params_.size(); i++)
      shapes.push_back({local_or_self(params_[i].tensor).sizes().vec(), layout_.dim(i)});
    reshard_layout_ = ShardLayout::per_parameter(std::move(shapes), reshard_group->size());
    reshard_group_ = reshard_group;
  }
  const at::NoGradGuard no_grad;
  auto shard = at::zeros({reshard_layout_->shard_numel()}, all_gather_output_.options());
  for (size_t i = 0; i < params_.size(); i++)
    reshard_layout_->copy_to_shard(i, all_gather_layout().unsharded_param(i, all_gather_output_),
                                   reshard_group_->rank(), shard);
  reshard();
  reshard_shard_ = std::move(shard);
  reshard_version_ = version();
}

void ParamGroup::abandon() {
  gradients_->abandon();
  if (!all_gather_done_) {
    discard(all_gather_output_, all_gather_group_);
    discard(staging_, all_gather_group_);
  }
  accept_writes(/*writeback=*/false);
  reshard();
  free_buffer();
}

int64_t ParamGroup::version() const {
  int64_t version = flat_param_.defined() ? flat_param_._version() : 0;
  for (const auto& param : params_) version += param.tensor._version();
  return version;
}

Unpack ParamGroup::pack(const at::Tensor& saved) {
  if (!unsharded_) return {};
  const bool distributed = is_dtensor(saved);
  const auto& local = distributed ? tessera::detail::local_of(saved) : saved;
  if (!local.has_storage() || !same_storage(local, all_gather_output_)) return {};
  SpecRef spec = distributed ? tessera::detail::meta_of(saved).spec : SpecRef();
  return [self = shared_from_this(), spec, sizes = local.sizes().vec(), strides = local.strides().vec(),
          offset = local.storage_offset(), version = version()] {
    const at::NoGradGuard no_grad;
    self->notify_before_backward(/*needs_values=*/true);
    TESSERA_CHECK(self->version() == version, UsageError, "a parameter of parameter group ", self->name_,
                  " was modified between the forward and the backward that needs its old value");
    self->wait_for_unshard();
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    auto view = at::as_strided(self->all_gather_output_, sizes, strides, offset);
    return spec ? tessera::detail::wrap(std::move(view), spec) : view;
  };
}

}  // namespace tessera::data_parallel::fsdp
