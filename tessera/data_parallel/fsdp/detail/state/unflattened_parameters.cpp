#include "tessera/data_parallel/fsdp/detail/state/unflattened_parameters.h"

#include "tessera/base/error.h"
#include "tessera/data_parallel/fsdp/detail/state/gather_shard.h"
#include "tessera/data_parallel/fsdp/detail/engine/joint_spec.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/nn/module_tree.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <unordered_map>

namespace tessera::data_parallel::fsdp {
namespace {

at::Tensor stand_in(const Unit& unit, size_t i) {
  const auto& member = unit.members()[i];
  const auto options = at::TensorOptions(at::kMeta).dtype(unit.flat().scalar_type());
  return as_whole(member, at::empty(unit.layout().sizes(i), options));
}

// A member that lies over other axes too: over all of them at once, cut once more along dim 0. Undefined where no
// placements say that: the meshes are not of one, or pieces are uneven in another way.
at::Tensor cut_over_both(const ShardedModule& sharded, const Member& member, const at::Tensor& whole) {
  if (!sharded.shard_axis) return {};
  SpecRef joint;
  try {
    joint = joint_spec(member.name, *member.outer, sharded.mesh, 0);
  } catch (const UsageError&) {
    return {};
  }
  const auto spec =
      intern(joint->mesh, joint->placements, joint->sizes, joint->strides, whole.scalar_type(), whole.device());
  const auto runs = shard_runs(Shard(0), whole.size(0), sharded.mesh.size(*sharded.shard_axis),
                               sharded.mesh.get_local_rank(*sharded.shard_axis));
  const auto mine = runs.empty() ? Run{0, 0} : runs[0];
  return tessera::detail::wrap(whole.narrow(0, mine.begin, mine.end - mine.begin).clone(), spec);
}

}  // namespace

Originals::Originals(torch::nn::Module& module) {
  std::unordered_map<const void*, FlatMember> members;
  std::unordered_map<const void*, at::Tensor> tensors;
  const auto all = find_all(module);
  for (const auto& sharded : all) {
    TESSERA_CHECK(!sharded->summoned, UsageError, "a state dict was asked for inside of summon_full_params(), of ",
                  class_name(*sharded->module), "; ask outside of it");
    const auto& unit = sharded->turn->unit;
    unit->close();
    if (unit->members().empty() || !unit->layout().is_flat()) continue;
    units.push_back(sharded);
    stand_ins.emplace_back();
    for (size_t i = 0; i < unit->members().size(); i++) {
      const auto* impl = unit->members()[i].handle.unsafeGetTensorImpl();
      stand_ins.back().push_back(stand_in(*unit, i));
      members.emplace(impl, FlatMember{sharded, i});
      tensors.emplace(impl, stand_ins.back().back());
    }
  }
  for (const auto& sharded : units)
    if (sharded->registration) sharded->registration->show_originals();
  slots = tessera::detail::slots_of(module);
  for (const auto& sharded : units)
    if (sharded->registration) sharded->registration->show_flat();
  for (auto& slot : slots) {
    const auto found = members.find(slot.tensor.unsafeGetTensorImpl());
    flat.push_back(found == members.end() ? FlatMember{} : found->second);
    if (found != members.end()) slot.tensor = tensors.at(found->first);
  }
}

at::Tensor Form::plain(const at::Tensor& value) const {
  const at::NoGradGuard no_grad;
  auto made = value.detach();
  if (full) made = is_dtensor(made) ? DTensor(made).full_tensor() : made.clone();
  return to_cpu ? made.cpu() : made;
}

at::Tensor Form::flat(const ShardedModule& sharded, const Member& member, const at::Tensor& whole) const {
  const at::NoGradGuard no_grad;
  at::Tensor made;
  if (full) {
    made = member.outer ? DTensor(as_whole(member, whole)).full_tensor() : whole.clone();
  } else if (member.outer) {
    made = cut_over_both(sharded, member, whole);
    if (!made.defined()) made = as_whole(member, whole.clone());
  } else {
    Placements placements(static_cast<size_t>(sharded.mesh.ndim()), Replicate());
    if (sharded.shard_axis) placements[static_cast<size_t>(*sharded.shard_axis)] = Shard(0);
    const auto spec = intern(sharded.mesh, placements, whole.sizes(), tessera::contiguous_strides(whole.sizes()),
                             whole.scalar_type(), whole.device());
    const auto runs = spec->runs(0);
    const int64_t begin = runs.empty() ? 0 : runs[0].begin;
    made = tessera::detail::wrap(whole.narrow(0, begin, spec->local_sizes[0]).clone(), spec);
  }
  return to_cpu ? made.cpu() : made;
}

}  // namespace tessera::data_parallel::fsdp
