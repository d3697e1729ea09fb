#include "tessera/data_parallel/fsdp/detail/engine/joint_spec.h"

#include "tessera/base/error.h"

#include <algorithm>

namespace tessera::data_parallel::fsdp {
namespace {

DeviceMesh root_of(const DeviceMesh& mesh) { return mesh.state()->root ? DeviceMesh(mesh.state()->root) : mesh; }

bool has_axis(const DeviceMesh& mesh, const std::string& axis) {
  return std::find(mesh.names().begin(), mesh.names().end(), axis) != mesh.names().end();
}

// The submesh of the root mesh that has the axes of both meshes.
DeviceMesh joint_mesh(const std::string& name, const TensorSpec& unsharded, const DeviceMesh& mesh) {
  const auto& other = unsharded.mesh;
  TESSERA_CHECK(!mesh.names().empty() && !other.names().empty(), UsageError, "fully_shard: parameter ", name, " is ",
                unsharded.describe(), " and is to be sharded over ", mesh,
                "; the axes of both meshes need names: slice both from one mesh");
  for (const auto& axis : mesh.names())
    TESSERA_CHECK(!has_axis(other, axis), UsageError, "fully_shard: parameter ", name, " is ", unsharded.describe(),
                  ", which already uses the axis '", axis,
                  "' that it is to be sharded over; distribute it over the other axes only");
  for (const auto& root : {root_of(mesh), root_of(other)}) {
    std::vector<std::string> names;
    for (const auto& axis : root.names())
      if (has_axis(mesh, axis) || has_axis(other, axis)) names.push_back(axis);
    if (static_cast<int64_t>(names.size()) != mesh.ndim() + other.ndim()) continue;
    const auto joint = root[names];
    if (joint[mesh.names()] == mesh && joint[other.names()] == other) return joint;
  }
  TESSERA_FAIL(UsageError, "fully_shard: parameter ", name, " is ", unsharded.describe(), " and is to be sharded over ",
               mesh, ", which is not part of the same mesh; slice both from one: auto mesh = ",
               "init_device_mesh(\"cpu\", {2, 2}, {\"dp\", \"tp\"}), then mesh[\"dp\"] and mesh[\"tp\"]");
}

// Elements [begin, end) of the concatenation of `runs`, again as runs.
IndexRanges slice_runs(const IndexRanges& runs, int64_t begin, int64_t end) {
  IndexRanges sliced;
  int64_t position = 0;
  for (const auto& run : runs) {
    const int64_t from = std::max(begin, position), to = std::min(end, position + run.end - run.begin);
    if (from < to) sliced.push_back({run.begin + from - position, run.begin + to - position});
    position += run.end - run.begin;
  }
  return sliced;
}

}  // namespace

SpecRef joint_spec(const std::string& name, const TensorSpec& unsharded, const DeviceMesh& mesh, int64_t dim) {
  TESSERA_CHECK(!unsharded.has_partial(), UsageError, "fully_shard: parameter ", name, " is ", unsharded.describe(),
                ", which is partial; redistribute it to Replicate or Shard first");
  const auto joint = joint_mesh(name, unsharded, mesh);
  const auto& shard_axis = mesh.names().back();
  Placements placements;
  for (const auto& axis : joint.names())
    placements.push_back(has_axis(unsharded.mesh, axis)
                             ? unsharded.placements[static_cast<size_t>(unsharded.mesh.axis(axis))]
                             : Replicate());
  // Axes to the left of shard_axis are applied before it, as needed. Axes to the right must also be applied before it,
  // which StridedShard expresses.
  const auto at = static_cast<size_t>(joint.axis(shard_axis));
  int64_t split_factor = 1;
  for (size_t a = at + 1; a < placements.size(); a++)
    if (placements[a].is_sharded(dim)) split_factor *= joint.shape()[a];
  placements[at] = split_factor > 1 ? StridedShard(dim, split_factor) : Shard(dim);
  auto spec = intern(joint, placements, unsharded.sizes, tessera::contiguous_strides(unsharded.sizes), unsharded.dtype,
                     unsharded.device);
  const int64_t size = unsharded.local_sizes[static_cast<size_t>(dim)];
  const auto local = shard_ranges(Shard(dim), size, mesh.size(shard_axis), mesh.get_local_rank(shard_axis));
  const auto expected =
      local.empty() ? IndexRanges() : slice_runs(unsharded.local_ranges(dim), local[0].begin, local[0].end);
  TESSERA_CHECK(spec->local_ranges(dim) == expected, UsageError, "fully_shard: parameter ", name, " is ",
                unsharded.describe(), ", and its local tensor cannot be sharded once more along dim ", dim,
                "; shard another dim with shard_placement_fn");
  return spec;
}

}  // namespace tessera::data_parallel::fsdp
