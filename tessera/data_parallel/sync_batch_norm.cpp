#include "tessera/data_parallel/sync_batch_norm.h"

#include "tessera/base/error.h"
#include "tessera/data_parallel/detail/group_batch_norm.h"
#include "tessera/nn/detail/hookable.h"

#include <string>
#include <utility>
#include <vector>

namespace tessera {
namespace {

struct BatchNormModule {
  detail::BatchNormParts parts;
  int64_t min_dims = 2, max_dims = 0;  // of the input
};

template <class Impl>
detail::BatchNormParts parts_of(const Impl& module) {
  const auto& o = module.options;
  return {o.num_features(),           module.weight, module.bias, module.running_mean, module.running_var,
          module.num_batches_tracked, o.momentum(),  o.eps()};
}

template <class Impl>
bool read_as(Module& module, BatchNormModule& into, int64_t min_dims, int64_t max_dims) {
  const auto* found = dynamic_cast<const Impl*>(&module);
  if (found) into = {parts_of(*found), min_dims, max_dims};
  return found;
}

// For BatchNorm1d, 2d and 3d of torch::nn and classes derived from them; none for other modules.
std::optional<BatchNormModule> batch_norm_in(Module& module) {
  BatchNormModule found;
  const bool is_one = read_as<torch::nn::BatchNorm1dImpl>(module, found, 2, 3) ||
                      read_as<torch::nn::BatchNorm2dImpl>(module, found, 4, 4) ||
                      read_as<torch::nn::BatchNorm3dImpl>(module, found, 5, 5);
  return is_one ? std::optional(found) : std::nullopt;
}

// Replaces forward. It has its own type, so that it can be found among the hooks of a module.
struct SyncHook {
  comm::Group group;

  Tensors operator()(Module& module, const Tensors& inputs, const ForwardCall& forward) const {
    if (!module.is_training() || group->size() == 1) return forward(inputs);
    const auto norm = *batch_norm_in(module);
    const auto dims = inputs[0].dim();
    TESSERA_CHECK(dims >= norm.min_dims && dims <= norm.max_dims, UsageError, "module ", running_module(), ", a ",
                  class_name(module), ", got an input of sizes ", inputs[0].sizes(), "; it takes ", norm.min_dims,
                  " to ", norm.max_dims, " dims");
    return {detail::group_batch_norm(inputs[0], norm.parts, group)};
  }
};

const SyncHook* sync_hook_of(const Module& module) {
  const auto* point = dynamic_cast<const HookPoint*>(&module);
  if (!point || !point->hooks()) return nullptr;
  for (const auto& entry : point->hooks()->around.entries())
    if (const auto* hook = entry->hook.target<SyncHook>()) return hook;
  return nullptr;
}

comm::Group or_world(comm::Group group) { return group ? group : World::current().group(); }

}  // namespace

void convert_sync_batchnorm(Module& module, comm::Group given) {
  const auto group = or_world(std::move(given));
  std::vector<std::string> names;
  for (const auto& item : module.named_modules()) {
    if (!batch_norm_in(*item.value())) continue;
    if (const auto* hook = sync_hook_of(*item.value())) {
      TESSERA_CHECK(hook->group == group, UsageError, "convert_sync_batchnorm: batch norm '", item.key(),
                    "' already uses group '", hook->group->name(), "'; requested: '", group->name(), "'");
      continue;
    }
    if (!can_be_hooked(module, item.key())) hookable(module, item.key());  // throws with the reason
    names.push_back(item.key());
  }
  for (const auto& name : names) {
    const auto target = hookable(module, name);
    // Prepended to be the innermost hook, because it does not call forward.
    if (!sync_hook_of(*target)) register_around_hook(*target, SyncHook{group}, {.prepend = true});
  }
}

void convert_sync_batchnorm(Module& module, const DeviceMesh& mesh) {
  convert_sync_batchnorm(module, mesh.get_group());
}

namespace nn {

SyncBatchNormImpl::SyncBatchNormImpl(const torch::nn::BatchNormOptions& options, comm::Group group)
    : BatchNormImplBase(options), group_(or_world(std::move(group))) {}

at::Tensor SyncBatchNormImpl::forward(const at::Tensor& x) {
  if (!is_training() || group_->size() == 1) return BatchNormImplBase::forward(x);
  return detail::group_batch_norm(x, parts_of(*this), group_);
}

void SyncBatchNormImpl::_check_input_dim(const at::Tensor& x) {
  TESSERA_CHECK(x.dim() >= 2, UsageError, "SyncBatchNorm takes inputs with at least two dims; found sizes ", x.sizes());
}

void SyncBatchNormImpl::pretty_print(std::ostream& out) const {
  out << "tessera::nn::SyncBatchNorm(" << options.num_features() << ", eps=" << options.eps() << ", group='"
      << group_->name() << "')";
}

}  // namespace nn
}  // namespace tessera
