#include "tessera/data_parallel/fsdp/detail/state/unflattened_parameters.h"

#include "tessera/base/error.h"
#include "tessera/data_parallel/detail/wrapper_module.h"
#include "tessera/data_parallel/fsdp/detail/engine/joint_spec.h"
#include "tessera/data_parallel/fsdp/detail/state/gather_shard.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/nn/module_tree.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <unordered_map>

namespace tessera::data_parallel::fsdp {
namespace {

at::Tensor make_meta_param(const ParamGroup& group, size_t i) {
  const auto options = at::TensorOptions(at::kMeta).dtype(group.flat_param().scalar_type());
  return wrap_unsharded(group.params()[i], at::empty(group.layout().sizes(i), options));
}

// For a parameter that is also distributed over other axes: shards its local tensor along dim 0 and returns a DTensor
// over all axes. Undefined if no placements describe that: the meshes have no common root, or shards are uneven.
at::Tensor shard_over_both(const ShardedModule& sharded, const FSDPParam& param, const at::Tensor& unsharded) {
  if (!sharded.shard_axis) return {};
  SpecRef joint;
  try {
    joint = joint_spec(param.name, *param.unsharded_spec, sharded.mesh, 0);
  } catch (const UsageError&) {
    return {};
  }
  const auto spec =
      intern(joint->mesh, joint->placements, joint->sizes, joint->strides, unsharded.scalar_type(), unsharded.device());
  const auto runs = shard_ranges(Shard(0), unsharded.size(0), sharded.mesh.size(*sharded.shard_axis),
                                 sharded.mesh.get_local_rank(*sharded.shard_axis));
  const auto local = runs.empty() ? IndexRange{0, 0} : runs[0];
  return tessera::detail::wrap(unsharded.narrow(0, local.begin, local.end - local.begin).clone(), spec);
}

// The prefix of names below each module, with and without the "module." of wrappers.
void collect_prefixes(const Module& module, const std::string& prefix, const std::string& without_wrappers,
                      std::unordered_map<std::string, std::string>& found) {
  found[prefix] = without_wrappers;
  const bool wraps = dynamic_cast<const WrapperModule*>(&module) != nullptr;
  for (const auto& child : module.named_children())
    collect_prefixes(*child.value(), prefix + child.key() + ".",
                     wraps && child.key() == "module" ? without_wrappers : without_wrappers + child.key() + ".", found);
}

}  // namespace

UnflattenedParameters::UnflattenedParameters(torch::nn::Module& module) {
  std::unordered_map<const void*, FlatParamRef> refs;
  for (const auto& sharded : find_sharded_modules(module)) {
    TESSERA_CHECK(!sharded->summoned, UsageError, "the state dict of ", class_name(*sharded->module),
                  " was requested inside summon_full_params(); request it outside");
    auto& group = sharded->group();
    group.reshard();
    if (group.params().empty() || !group.layout().is_flat()) continue;
    flat_modules.push_back(sharded);
    meta_params.emplace_back();
    for (size_t i = 0; i < group.params().size(); i++) {
      meta_params.back().push_back(make_meta_param(group, i));
      refs.emplace(group.params()[i].tensor.unsafeGetTensorImpl(), FlatParamRef{sharded, i});
    }
  }
  for (const auto& sharded : flat_modules)
    if (sharded->registration) sharded->registration->register_unflattened();
  slots = tessera::detail::slots_of(module);
  for (const auto& sharded : flat_modules)
    if (sharded->registration) sharded->registration->register_flat();
  std::unordered_map<std::string, std::string> prefixes;
  collect_prefixes(module, "", "", prefixes);
  for (auto& slot : slots) {
    const auto end_of_prefix = slot.name.rfind('.') + 1;  // 0: a parameter of the module itself
    slot.name = prefixes.at(slot.name.substr(0, end_of_prefix)) + slot.name.substr(end_of_prefix);
    const auto found = refs.find(slot.tensor.unsafeGetTensorImpl());
    flat_refs.push_back(found == refs.end() ? FlatParamRef{} : found->second);
    if (found == refs.end()) continue;
    const auto& [sharded, index] = found->second;
    const auto at = std::find(flat_modules.begin(), flat_modules.end(), sharded) - flat_modules.begin();
    slot.tensor = meta_params[static_cast<size_t>(at)][index];
  }
}

at::Tensor StateDictForm::convert(const at::Tensor& value) const {
  const at::NoGradGuard no_grad;
  auto converted = value.detach();
  if (full) converted = is_dtensor(converted) ? DTensor(converted).full_tensor() : converted.clone();
  return to_cpu ? converted.cpu() : converted;
}

at::Tensor StateDictForm::convert_flat(const ShardedModule& sharded, const FSDPParam& param,
                                       const at::Tensor& unsharded) const {
  const at::NoGradGuard no_grad;
  at::Tensor converted;
  if (full) {
    converted = param.unsharded_spec ? DTensor(wrap_unsharded(param, unsharded)).full_tensor() : unsharded.clone();
  } else if (param.unsharded_spec) {
    converted = shard_over_both(sharded, param, unsharded);
    if (!converted.defined()) converted = wrap_unsharded(param, unsharded.clone());
  } else {
    Placements placements(static_cast<size_t>(sharded.mesh.ndim()), Replicate());
    if (sharded.shard_axis) placements[static_cast<size_t>(*sharded.shard_axis)] = Shard(0);
    const auto spec =
        intern(sharded.mesh, placements, unsharded.sizes(), tessera::contiguous_strides(unsharded.sizes()),
               unsharded.scalar_type(), unsharded.device());
    const auto runs = spec->local_ranges(0);
    const int64_t begin = runs.empty() ? 0 : runs[0].begin;
    converted = tessera::detail::wrap(unsharded.narrow(0, begin, spec->local_sizes[0]).clone(), spec);
  }
  return to_cpu ? converted.cpu() : converted;
}

}  // namespace tessera::data_parallel::fsdp
