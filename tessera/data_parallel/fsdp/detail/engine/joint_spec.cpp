#include "tessera/data_parallel/fsdp/detail/engine/joint_spec.h"

#include "tessera/base/error.h"

#include <algorithm>

namespace tessera::data_parallel::fsdp {
namespace {

DeviceMesh root_of(const DeviceMesh& mesh) { return mesh.state()->root ? DeviceMesh(mesh.state()->root) : mesh; }

bool has(const DeviceMesh& mesh, const std::string& axis) {
  return std::find(mesh.names().begin(), mesh.names().end(), axis) != mesh.names().end();
}

// The part of the root that has the axes of both.
DeviceMesh joint_mesh(const std::string& name, const TensorSpec& whole, const DeviceMesh& mesh) {
  const auto& other = whole.mesh;
  TESSERA_CHECK(!mesh.names().empty() && !other.names().empty(), UsageError, "fully_shard: parameter ", name, " is ",
                whole.describe(), " and is to be cut over ", mesh,
                "; give the axes of both names, by slicing them from one mesh");
  for (const auto& axis : mesh.names())
    TESSERA_CHECK(!has(other, axis), UsageError, "fully_shard: parameter ", name, " is ", whole.describe(),
                  ", which has the axis '", axis, "' that it is to be cut over; distribute it over the others alone");
  for (const auto& root : {root_of(mesh), root_of(other)}) {
    std::vector<std::string> names;
    for (const auto& axis : root.names())
      if (has(mesh, axis) || has(other, axis)) names.push_back(axis);
    if (static_cast<int64_t>(names.size()) != mesh.ndim() + other.ndim()) continue;
    const auto joint = root[names];
    if (joint[mesh.names()] == mesh && joint[other.names()] == other) return joint;
  }
  TESSERA_FAIL(
      UsageError, "fully_shard: parameter ", name, " is ", whole.describe(), " and is to be cut over ", mesh,
      ", which is no part of the same mesh; slice both from one: auto mesh = init_device_mesh(\"cpu\", {2, 2}, ",
      "{\"dp\", \"tp\"}), then mesh[\"dp\"] and mesh[\"tp\"]");
}

// Positions [begin, end) of what is held.
Runs within(const Runs& held, int64_t begin, int64_t end) {
  Runs taken;
  int64_t position = 0;
  for (const auto& run : held) {
    const int64_t from = std::max(begin, position), to = std::min(end, position + run.end - run.begin);
    if (from < to) taken.push_back({run.begin + from - position, run.begin + to - position});
    position += run.end - run.begin;
  }
  return taken;
}

}  // namespace

SpecRef joint_spec(const std::string& name, const TensorSpec& whole, const DeviceMesh& mesh, int64_t dim) {
  TESSERA_CHECK(!whole.has_partial(), UsageError, "fully_shard: parameter ", name, " is ", whole.describe(),
                ", a sum that was not taken; redistribute it first");
  const auto joint = joint_mesh(name, whole, mesh);
  const auto& cut_axis = mesh.names().back();
  Placements placements;
  for (const auto& axis : joint.names())
    placements.push_back(has(whole.mesh, axis) ? whole.placements[static_cast<size_t>(whole.mesh.axis(axis))]
                                               : Replicate());
  // Axes to the left cut before this one does, as it should be. For those to the right it has to wait.
  const auto at = static_cast<size_t>(joint.axis(cut_axis));
  int64_t pieces = 1;
  for (size_t a = at + 1; a < placements.size(); a++)
    if (placements[a].is_sharded(dim)) pieces *= joint.shape()[a];
  placements[at] = pieces > 1 ? StridedShard(dim, pieces) : Shard(dim);
  auto spec =
      intern(joint, placements, whole.sizes, tessera::contiguous_strides(whole.sizes), whole.dtype, whole.device);
  const auto held = whole.runs(dim);
  const int64_t size = whole.local_sizes[static_cast<size_t>(dim)];
  const auto mine = shard_runs(Shard(dim), size, mesh.size(cut_axis), mesh.get_local_rank(cut_axis));
  const auto wanted = mine.empty() ? Runs() : within(held, mine[0].begin, mine[0].end);
  TESSERA_CHECK(spec->runs(dim) == wanted, UsageError, "fully_shard: parameter ", name, " is ", whole.describe(),
                ", and what a rank has of that cannot be cut along dim ", dim,
                " once more; cut another dim with shard_placement_fn");
  return spec;
}

}  // namespace tessera::data_parallel::fsdp
