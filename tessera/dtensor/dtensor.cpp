#include "tessera/dtensor/dtensor.h"

#include "tessera/base/detail/same_storage.h"
#include "tessera/base/error.h"
#include "tessera/comm/detail/collective_label.h"
#include "tessera/dtensor/detail/autograd_functions.h"
#include "tessera/dtensor/register.h"
#include "tessera/placement/detail/take_ranges.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/alias.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/split_with_sizes.h>
#include <ATen/ops/tensor.h>

#include <ostream>

namespace tessera {
namespace {

Placements normalized_for(PlacementsRef placements, const DeviceMesh& mesh, int64_t ndim, const char* function) {
  TESSERA_CHECK(mesh, UsageError, function, ": no mesh given");
  if (placements.empty()) return Placements(mesh.ndim(), Replicate());
  TESSERA_CHECK(static_cast<int64_t>(placements.size()) == mesh.ndim(), UsageError, function, ": mesh(", mesh, ") has ",
                mesh.ndim(), " axes, ", placements.size(), " placements were given, ", to_string(placements),
                "; write one placement per axis");
  return normalize(placements, ndim);
}

void check_plain(const at::Tensor& t, const char* function) {
  TESSERA_CHECK(t.defined(), UsageError, function, ": the tensor is undefined");
  TESSERA_CHECK(!is_dtensor(t), UsageError, function, ": the tensor is distributed already, ",
                detail::meta_of(t).spec->describe(), "; use redistribute to change its placements");
}

// What ranks compare of their tensors.
struct TensorMetadata {
  c10::ScalarType dtype;
  std::vector<int64_t> sizes;
};

// The metadata of every rank's tensor, in the order of mesh.ranks(). All ranks get the same, so either all of them
// throw or none.
std::vector<TensorMetadata> gather_metadata(const at::Tensor& t, const DeviceMesh& mesh) {
  constexpr int64_t kMostDims = 62;
  std::vector<int64_t> words = {static_cast<int64_t>(t.scalar_type()), t.dim()};
  TESSERA_CHECK(t.dim() <= kMostDims, UsageError, "a DTensor has at most ", kMostDims, " dims, this tensor ", t.dim());
  words.insert(words.end(), t.sizes().begin(), t.sizes().end());
  words.resize(2 + kMostDims);
  auto all = at::tensor(words, at::kLong).to(mesh.device_type());
  for (int64_t axis = mesh.ndim() - 1; axis >= 0; axis--) {
    auto gathered = at::empty({mesh.size(axis) * all.numel()}, all.options());
    mesh.get_group(axis)->all_gather_into_tensor(gathered, all).wait();
    all = gathered;
  }
  all = all.cpu();
  std::vector<TensorMetadata> found;
  for (int64_t rank = 0; rank < mesh.size(); rank++) {
    const auto* row = all.const_data_ptr<int64_t>() + rank * (2 + kMostDims);
    found.push_back({static_cast<c10::ScalarType>(row[0]), {row + 2, row + 2 + row[1]}});
  }
  return found;
}

template <class... What>
[[noreturn]] void fail_rank(size_t position, const TensorMetadata& found, const DeviceMesh& mesh,
                            PlacementsRef placements, const What&... what) {
  TESSERA_FAIL(UsageError, "from_local with ", to_string(placements), " on mesh(", mesh, "): rank ",
               mesh.ranks()[position], " has a local tensor of ", c10::toString(found.dtype),
               c10::IntArrayRef(found.sizes), what...);
}

void check_same_kind(const std::vector<TensorMetadata>& found, const DeviceMesh& mesh, PlacementsRef placements) {
  for (size_t i = 1; i < found.size(); i++)
    if (found[i].dtype != found[0].dtype || found[i].sizes.size() != found[0].sizes.size())
      fail_rank(i, found[i], mesh, placements, ", rank ", mesh.ranks()[0], " one of ", c10::toString(found[0].dtype),
                c10::IntArrayRef(found[0].sizes), "; all ranks must have the same dtype and number of dims");
}

// Checks that every rank has the sizes that its placement gives.
void check_local_sizes(const std::vector<TensorMetadata>& found, const TensorSpec& spec) {
  const auto& mesh = spec.mesh;
  std::vector<int64_t> coordinate(static_cast<size_t>(mesh.ndim()));
  for (size_t i = 0; i < found.size(); i++) {
    auto position = static_cast<int64_t>(i);
    for (int64_t axis = mesh.ndim() - 1; axis >= 0; axis--) {
      coordinate[axis] = position % mesh.shape()[axis];
      position /= mesh.shape()[axis];
    }
    const auto expected = local_sizes(spec.placements, mesh.shape(), coordinate, spec.sizes);
    if (c10::IntArrayRef(found[i].sizes) != c10::IntArrayRef(expected))
      fail_rank(i, found[i], mesh, spec.placements, "; for the global sizes ", c10::IntArrayRef(spec.sizes),
                " it should have ", c10::IntArrayRef(expected),
                ". Give the global shape and stride if shards are uneven.");
  }
}

// The mesh axes in the order in which distribute_tensor handles them. Axes that shard the same dim are in shard order:
// a strided shard comes after the axis that it subdivides.
ShardOrder distribution_order(PlacementsRef placements, const DeviceMesh& mesh) {
  ShardOrder steps;
  std::vector<bool> dims_done(64);
  for (int64_t axis = 0; axis < mesh.ndim(); axis++) {
    const auto& p = placements[axis];
    if (!p.is_sharded()) {
      steps.push_back({axis, p});
    } else if (!dims_done[p.dim]) {
      for (const auto& step : shard_order(placements, mesh.shape(), p.dim)) steps.push_back(step);
      dims_done[p.dim] = true;
    }
  }
  return steps;
}

// A number that differs for tensors of different sizes or dtypes.
int32_t label_number(const at::Tensor& t) {
  uint64_t h = static_cast<uint64_t>(t.scalar_type()) + 1;
  for (auto size : t.sizes()) h = (h * 1'000'003) ^ static_cast<uint64_t>(size + 1);
  return static_cast<int32_t>(h % 2'147'483'629) + 1;
}

at::Tensor broadcast(const at::Tensor& t, comm::Communicator& group, const DistributeOptions& options) {
  if (!options.src_data_rank) return t;
  auto value = t.clone(at::MemoryFormat::Contiguous);
  group.broadcast(value, *options.src_data_rank).wait();
  return value;
}

at::Tensor scatter(const at::Tensor& t, const Placement& shard, comm::Communicator& group,
                   const DistributeOptions& options) {
  auto shard_of = [&](int64_t r) {
    return take_ranges(t, shard.dim, shard_ranges(shard, t.size(shard.dim), group.size(), r));
  };
  auto mine = shard_of(group.rank());
  if (!options.src_data_rank) return mine;
  std::vector<at::Tensor> shards;
  if (group.rank() == *options.src_data_rank)
    for (int64_t r = 0; r < group.size(); r++) shards.push_back(shard_of(r));
  group.scatter(mine, std::move(shards), *options.src_data_rank).wait();
  return mine;
}

// Communicates. Returns this rank's local tensor of the source rank's values, in new memory.
at::Tensor scatter_and_broadcast(const at::Tensor& t, const TensorSpec& spec, const DistributeOptions& options) {
  auto local = t.detach();
  for (const auto& [axis, placement] : distribution_order(spec.placements, spec.mesh))
    local = placement.is_sharded() ? scatter(local, placement, *spec.mesh.get_group(axis), options)
                                   : broadcast(local, *spec.mesh.get_group(axis), options);
  return same_storage(local, t) ? local.clone(at::MemoryFormat::Contiguous) : local;
}

}  // namespace

DTensor::DTensor(const at::Tensor& t) : at::Tensor(t) {
  TESSERA_CHECK(!t.defined() || is_dtensor(t), UsageError, "a plain tensor of sizes ", t.sizes(),
                " is not a DTensor; make one with distribute_tensor or DTensor::from_local");
}

void DTensor::fail_not_distributed() const {
  TESSERA_CHECK(defined(), UsageError,
                "this DTensor is undefined: it was default-constructed; make one with distribute_tensor or from_local");
  TESSERA_FAIL(UsageError, "this handle was a DTensor and refers to a plain tensor of sizes ", sizes(),
               " now: its data was replaced by set_data()");
}

DTensor DTensor::from_local(const at::Tensor& local, const DeviceMesh& mesh, PlacementsRef placements,
                            FromLocalOptions options) {
  detail::register_kernels();
  check_plain(local, "from_local");
  TESSERA_CHECK(mesh, UsageError, "from_local: no mesh given");
  std::vector<TensorMetadata> of_all_ranks;
  if (options.run_check) {
    of_all_ranks = gather_metadata(local, mesh);
    check_same_kind(of_all_ranks, mesh, placements);
  }
  const auto to = normalized_for(placements, mesh, local.dim(), "from_local");
  TESSERA_CHECK(options.shape.has_value() == options.stride.has_value(), UsageError,
                "from_local: give shape and stride both or neither; only ", options.shape ? "shape" : "stride",
                " was given");
  Sizes sizes, strides;
  if (options.shape) {
    sizes.assign(options.shape->begin(), options.shape->end());
    strides.assign(options.stride->begin(), options.stride->end());
    TESSERA_CHECK(sizes.size() == static_cast<size_t>(local.dim()) && strides.size() == sizes.size(), UsageError,
                  "from_local: the local tensor has ", local.dim(), " dims, the global shape ", sizes.size(),
                  ", the stride ", strides.size());
  } else {
    sizes.assign(local.sizes().begin(), local.sizes().end());
    for (int64_t a = 0; a < mesh.ndim(); a++)
      if (to[a].is_sharded()) sizes[to[a].dim] *= mesh.shape()[a];
    strides = local.is_contiguous() ? tessera::contiguous_strides(sizes) : strides_in_order_of(sizes, local.strides());
  }
  auto spec = intern(mesh, to, sizes, strides, local.scalar_type(), local.device());
  if (options.run_check) check_local_sizes(of_all_ranks, *spec);
  TESSERA_CHECK(local.sizes() == c10::IntArrayRef(spec->local_sizes), UsageError,
                "from_local: the local tensor has sizes ", local.sizes(), "; for ", spec->describe(),
                " it should have ", c10::IntArrayRef(spec->local_sizes));
  if (options.run_check) {
    at::NoGradGuard no_grad;
    at::Tensor value = local;
    for (int64_t axis = 0; axis < mesh.ndim(); axis++)
      if (to[axis].is_replicate()) mesh.get_group(axis)->broadcast(value, 0).wait();
  }
  return detail::from_local(detail::match_strides(local, *spec), spec);
}

at::Tensor DTensor::to_local(PlacementsRef grad_placements) const {
  const auto& mesh = spec().mesh;
  return detail::to_local(
      *this, grad_placements.empty() ? Placements() : normalized_for(grad_placements, mesh, dim(), "to_local"));
}

DTensor DTensor::redistribute(PlacementsRef placements) const {
  const auto to = normalized_for(placements, spec().mesh, dim(), "redistribute");
  for (size_t a = 0; a < to.size(); a++)
    TESSERA_CHECK(!to[a].is_partial() || to[a] == spec().placements[a], UsageError, "redistribute of ",
                  spec().describe(), " to ", to_string(to),
                  ": the target must not be Partial; write Replicate or Shard");
  return detail::redistribute(*this, to);
}

DTensor DTensor::redistribute(const DeviceMesh& mesh, PlacementsRef placements) const {
  TESSERA_CHECK(
      mesh == spec().mesh, UsageError, "redistribute of ", spec().describe(), " to mesh(", mesh,
      "): the target must be on the same mesh; call full_tensor() and distribute_tensor the result on the other mesh");
  return redistribute(placements);
}

at::Tensor DTensor::full_tensor(PlacementsRef grad_placements) const {
  const Placements replicated(spec().placements.size(), Replicate());
  return DTensor(detail::redistribute(*this, replicated)).to_local(grad_placements);
}

DTensor distribute_tensor(const at::Tensor& t, const DeviceMesh& mesh, PlacementsRef placements,
                          DistributeOptions options) {
  detail::register_kernels();
  TESSERA_CHECK(t.defined(), UsageError, "distribute_tensor: the tensor is undefined");
  const auto to = normalized_for(placements, mesh, t.dim(), "distribute_tensor");
  if (is_dtensor(t)) {
    const auto& spec = *detail::meta_of(t).spec;
    TESSERA_CHECK(spec.mesh == mesh && PlacementsRef(spec.placements) == PlacementsRef(to), UsageError,
                  "distribute_tensor: the tensor is distributed already, ", spec.describe(), "; the call requests ",
                  to_string(to), " on mesh(", mesh, "); use redistribute");
    return t;
  }
  TESSERA_CHECK(t.is_leaf(), UsageError,
                "distribute_tensor: only a leaf tensor can be distributed, but this one has a grad_fn; "
                "use DTensor::from_local, which is differentiable, or detach() it");
  for (const auto& p : to)
    TESSERA_CHECK(!p.is_partial(), UsageError, "distribute_tensor to ", to_string(to),
                  ": a placement must not be Partial; write Replicate or Shard");
  if (options.src_data_rank)
    for (auto n : mesh.shape())
      TESSERA_CHECK(*options.src_data_rank >= 0 && *options.src_data_rank < n, UsageError,
                    "distribute_tensor: src_data_rank ", *options.src_data_rank, " is not on every axis of mesh(", mesh,
                    ")");

  // Ranks that pass different tensors get an error with this text, instead of each other's values.
  const auto what = c10::str("distribute_tensor of ", c10::toString(t.scalar_type()), t.sizes());
  const comm::CollectiveLabel label(what.c_str(), label_number(t));
  at::NoGradGuard no_grad;
  auto spec = intern(mesh, to, t.sizes(), tessera::contiguous_strides(t.sizes()), t.scalar_type(), t.device());
  auto local = t.is_meta() ? detail::local_without_storage(t, *spec) : scatter_and_broadcast(t, *spec, options);
  DTensor out = detail::wrap(std::move(local), spec);
  out.set_requires_grad(t.requires_grad());
  return out;
}

void distribute_in_place(at::Tensor& t, const DeviceMesh& mesh, PlacementsRef placements, DistributeOptions options) {
  TESSERA_CHECK(t.is_leaf(), UsageError,
                "distribute_in_place: the tensor has a grad_fn; only parameters and buffers can be converted");
  TESSERA_CHECK(!t.grad().defined(), UsageError,
                "distribute_in_place: the tensor has a gradient, which would stay plain; reset it first");
  const bool requires_grad = t.requires_grad();
  t.set_data(distribute_tensor(t.detach(), mesh, placements, options));
  t.set_requires_grad(requires_grad);
}

std::ostream& operator<<(std::ostream& out, const DTensor& t) {
  if (!t.defined()) return out << "DTensor(undefined)";
  constexpr int64_t kMostValues = 1000;
  const auto& spec = t.spec();
  auto& meta = detail::meta_of(t);
  const auto& local = meta.pending ? detail::local_of(t) : meta.local;  // printing must not communicate
  out << "DTensor(" << spec.describe() << ")";
  if (spec.mesh.state()->coordinate.empty()) return out << ", not on this rank";
  out << "\nlocal tensor of rank " << spec.mesh.get_rank() << ", " << local.sizes();
  if (local.is_meta() || local.numel() > kMostValues) return out;
  return out << ":\n" << local.detach();
}

}  // namespace tessera
