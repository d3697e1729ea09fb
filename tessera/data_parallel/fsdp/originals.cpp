#include "tessera/data_parallel/fsdp/originals.h"

#include "tessera/base/error.h"
#include "tessera/data_parallel/fsdp/gather_shard.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/nn/module_tree.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <unordered_map>

namespace tessera::data_parallel::fsdp {
namespace {

at::Tensor stand_in(const Unit& unit, size_t i) {
  const auto& member = unit.members()[i];
  const auto options = at::TensorOptions(at::kMeta).dtype(unit.flat().scalar_type());
  return as_whole(member, at::empty(unit.layout().sizes(i), options));
}

// The axes of both meshes, in the order of the mesh that they were sliced from; none if they were not from one.
DeviceMesh joint_mesh(const DeviceMesh& a, const DeviceMesh& b) {
  const auto root_of = [](const DeviceMesh& mesh) {
    return mesh.state()->root ? mesh.state()->root : mesh.state_ptr();
  };
  const DeviceMesh root(root_of(a));
  if (root_of(a) != root_of(b) || root.names().empty()) return {};
  std::vector<std::string> names;
  for (const auto& name : root.names())
    for (const auto* mesh : {&a, &b})
      for (const auto& own : mesh->names())
        if (own == name) names.push_back(name);
  if (static_cast<int64_t>(names.size()) != a.ndim() + b.ndim()) return {};
  return root[names];
}

// A member that is cut over other axes too: over all of them at once. What tensor parallelism cut first is cut once
// more along dim 0.
at::Tensor cut_over_both(const ShardedModule& sharded, const TensorSpec& outer, const at::Tensor& whole) {
  const auto joint = joint_mesh(sharded.mesh, outer.mesh);
  if (!joint) return {};
  Placements placements;
  int64_t pieces_before = 1;  // of dim 0, by axes that stand behind the cutting one
  for (int64_t axis = joint.ndim() - 1; axis >= 0; axis--) {
    const auto& name = joint.names()[static_cast<size_t>(axis)];
    const auto& own = sharded.mesh.names();
    if (std::find(own.begin(), own.end(), name) == own.end()) {
      const auto placement = outer.placements[static_cast<size_t>(outer.mesh.axis(name))];
      if (placement.is_cut(0)) pieces_before *= joint.size(axis);
      placements.insert(placements.begin(), placement);
    } else if (sharded.shard_axis && sharded.mesh.axis(name) == *sharded.shard_axis) {
      placements.insert(placements.begin(), pieces_before > 1 ? StridedShard(0, pieces_before) : Shard(0));
    } else {
      placements.insert(placements.begin(), Replicate());
    }
  }
  const auto spec = intern(joint, placements, outer.sizes, outer.strides, whole.scalar_type(), whole.device());
  auto piece = whole;
  if (sharded.shard_axis) {
    const int64_t ranks = sharded.mesh.size(*sharded.shard_axis),
                  rank = sharded.mesh.get_local_rank(*sharded.shard_axis);
    const int64_t length = (whole.size(0) + ranks - 1) / ranks;
    const int64_t begin = std::min(rank * length, whole.size(0));
    piece = whole.narrow(0, begin, std::min(length, whole.size(0) - begin));
  }
  if (piece.sizes() != c10::IntArrayRef(spec->local_sizes)) return {};  // uneven in a way that placements cannot say
  return tessera::detail::wrap(piece.clone(), spec);
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
    made = cut_over_both(sharded, *member.outer, whole);
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
