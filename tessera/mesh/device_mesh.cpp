#include "tessera/mesh/device_mesh.h"

#include "tessera/base/detail/hash.h"
#include "tessera/base/error.h"
#include "tessera/comm/detail/world_state.h"
#include "tessera/mesh/detail/intern.h"

#include <ATen/Context.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <numeric>
#include <set>

namespace tessera {
namespace {

using detail::MeshState;
using StatePtr = c10::intrusive_ptr<MeshState>;

int64_t product(const std::vector<int64_t>& xs) {
  return std::accumulate(xs.begin(), xs.end(), int64_t{1}, std::multiplies<>());
}

bool is_device_type(const std::string& text) {
  try {
    (void)c10::Device(text);
    return true;
  } catch (const c10::Error&) {
    return false;
  }
}

void check_shape(const std::string& device_type, const std::vector<int64_t>& shape, const std::vector<int64_t>& ranks,
                 const std::vector<std::string>& names, const World& world) {
  TESSERA_CHECK(device_type.find(':') == std::string::npos, UsageError, "device type '", device_type,
                "' has an index; write only the type, as in \"cuda\"");
  TESSERA_CHECK(is_device_type(device_type), UsageError, "a mesh of device type '", device_type,
                "': LibTorch has no such device; write \"cpu\" or \"cuda\"");
  TESSERA_CHECK(
      device_type != "cuda" || at::hasCUDA(), UsageError,
      "a mesh of device type 'cuda', but this process has no CUDA: LibTorch was built without it, or finds no ",
      "GPU and driver; write \"cpu\"");
  TESSERA_CHECK(!shape.empty(), UsageError, "a mesh needs at least one axis");
  for (int64_t extent : shape)
    TESSERA_CHECK(extent > 0, UsageError, "mesh of shape ", c10::Join("x", shape),
                  ": every axis needs at least one rank");
  TESSERA_CHECK(names.empty() || names.size() == shape.size(), UsageError, "mesh of shape ", c10::Join("x", shape),
                " has ", shape.size(), " axes but ", names.size(), " names: ", c10::Join(",", names));
  std::set<std::string> seen;
  for (const auto& name : names) {
    TESSERA_CHECK(!name.empty(), UsageError, "mesh axis names ", c10::Join(",", names), ": one is empty");
    TESSERA_CHECK(seen.insert(name).second, UsageError, "mesh axis names ", c10::Join(",", names), ": '", name,
                  "' is given twice");
  }
  TESSERA_CHECK(static_cast<int64_t>(ranks.size()) <= world.size(), UsageError, "mesh of shape ", c10::Join("x", shape),
                " needs ", ranks.size(), " ranks; the world has ", world.size());
  std::set<int64_t> distinct;
  for (int64_t r : ranks) {
    TESSERA_CHECK(r >= 0 && r < world.size(), UsageError, "mesh contains rank ", r, "; the world has ranks 0 to ",
                  world.size() - 1);
    TESSERA_CHECK(distinct.insert(r).second, UsageError, "mesh contains rank ", r, " twice");
  }
}

std::vector<int64_t> find_coordinate(const MeshState& mesh) {
  auto place = std::find(mesh.ranks.begin(), mesh.ranks.end(), mesh.world.rank());
  if (place == mesh.ranks.end()) return {};
  int64_t flat = place - mesh.ranks.begin();
  std::vector<int64_t> coordinate(mesh.shape.size());
  for (size_t axis = mesh.shape.size(); axis-- > 0;) {
    coordinate[axis] = flat % mesh.shape[axis];
    flat /= mesh.shape[axis];
  }
  return coordinate;
}

// The ranks whose coordinates differ from this rank's only along `axes`, in row-major order.
//   mesh [[0 1 2] [3 4 5]]: along axis 1 from rank 4: {3 4 5}; along axis 0: {1 4}
std::vector<int64_t> ranks_along(const MeshState& mesh, const std::vector<int64_t>& axes) {
  std::vector<int64_t> stride(mesh.shape.size(), 1), at = mesh.coordinate, result;
  for (size_t axis = stride.size() - 1; axis-- > 0;) stride[axis] = stride[axis + 1] * mesh.shape[axis + 1];
  int64_t count = 1;
  for (int64_t axis : axes) count *= mesh.shape[static_cast<size_t>(axis)];
  for (int64_t i = 0; i < count; i++) {
    int64_t rest = i;
    for (size_t a = axes.size(); a-- > 0;) {
      const auto axis = static_cast<size_t>(axes[a]);
      at[axis] = rest % mesh.shape[axis];
      rest /= mesh.shape[axis];
    }
    int64_t flat = 0;
    for (size_t axis = 0; axis < at.size(); axis++) flat += at[axis] * stride[axis];
    result.push_back(mesh.ranks[static_cast<size_t>(flat)]);
  }
  return result;
}

// All meshes with these ranks along an axis share one group. Each axis has it under its own name.
comm::Group named_group(const World& world, const std::vector<int64_t>& ranks, const std::string& name) {
  comm::Group group = world.shared_group(ranks);
  return name.empty() || group->name() == name ? group : group->alias(name);
}

std::vector<int64_t> all_axes(const MeshState& mesh) {
  std::vector<int64_t> axes(mesh.shape.size());
  std::iota(axes.begin(), axes.end(), 0);
  return axes;
}

std::string joined_name(const MeshState& mesh, const std::vector<int64_t>& axes) {  // "dp_tp", or "axes_0_1"
  std::vector<std::string> parts;
  if (mesh.names.empty()) parts.push_back("axes");
  for (int64_t axis : axes) parts.push_back(mesh.names.empty() ? std::to_string(axis) : mesh.axis_name(axis));
  return c10::str(c10::Join("_", parts));
}

// If ranks make different meshes of all ranks, they would wait for each other in different groups. So the first rank
// writes its mesh to the store, and the others compare theirs with it. No rank waits.
void check_agreement(const MeshState& mesh) {
  const World& world = mesh.world;
  if (mesh.ranks.size() != static_cast<size_t>(world.size()) || world.size() == 1 || world.backend() == "fake") return;
  const std::string mine = c10::str("shape ", c10::Join("x", mesh.shape), ", names '", c10::Join(",", mesh.names),
                                    "', ranks ", c10::Join(",", mesh.ranks));
  const auto made = world.store()->add(c10::str("mesh/made/", world.rank()), 1);
  const std::string first = world.store()->compareSet(c10::str("mesh/", made), "", c10::str(world.rank(), " ", mine));
  const size_t space = first.find(' ');
  TESSERA_CHECK(first.substr(space + 1) == mine, UsageError, "rank ", world.rank(), " makes its mesh number ", made,
                " of all ranks with ", mine, "; rank ", first.substr(0, space), " made its mesh number ", made,
                " with ", first.substr(space + 1), ". All ranks must make the same meshes, in the same order");
}

StatePtr make_mesh(const World& world, const std::string& device_type, std::vector<int64_t> shape,
                   std::vector<int64_t> ranks, std::vector<std::string> names, StatePtr root = {}) {
  check_shape(device_type, shape, ranks, names, world);
  auto state = c10::make_intrusive<MeshState>();
  state->device_type = device_type;
  state->shape = std::move(shape);
  state->ranks = std::move(ranks);
  state->names = std::move(names);
  state->world = world;
  if (auto known = detail::find_interned(*state)) return known;
  if (!root) check_agreement(*state);
  state->root = std::move(root);
  state->coordinate = find_coordinate(*state);
  state->groups.resize(state->shape.size());
  if (!state->coordinate.empty())
    for (int64_t axis = 0; axis < state->ndim(); axis++)
      state->groups[static_cast<size_t>(axis)] =
          named_group(world, ranks_along(*state, {axis}), state->names.empty() ? "" : state->axis_name(axis));
  detail::intern(state);
  return state;
}

std::vector<int64_t> read_ranks(const at::Tensor& ranks) {
  TESSERA_CHECK(ranks.device().is_cpu() && c10::isIntegralType(ranks.scalar_type(), false), UsageError,
                "the ranks of a mesh must be an integer CPU tensor; found ", ranks.scalar_type(), " on ",
                ranks.device());
  at::Tensor flat = ranks.to(at::kLong).contiguous();
  return {flat.const_data_ptr<int64_t>(), flat.const_data_ptr<int64_t>() + flat.numel()};
}

thread_local std::vector<DeviceMesh> scopes;

}  // namespace

std::string MeshState::axis_name(int64_t axis) const {
  return names.empty() ? c10::str("axis ", axis) : names[static_cast<size_t>(axis)];
}

comm::Group MeshState::joint_group(const std::vector<int64_t>& axes) {
  TESSERA_CHECK(!coordinate.empty(), UsageError, "rank ", world.rank(), " is not in the mesh; it has no group in it");
  if (axes.size() == 1) return groups[static_cast<size_t>(axes[0])];
  for (const auto& [known, group] : joint_groups_)
    if (known == axes) return group;
  joint_groups_.emplace_back(axes, named_group(world, ranks_along(*this, axes), joined_name(*this, axes)));
  return joint_groups_.back().second;
}

DeviceMesh::DeviceMesh(const std::string& device_type, const at::Tensor& ranks, std::vector<std::string> names)
    : state_(make_mesh(World::current(), device_type, ranks.sizes().vec(), read_ranks(ranks), std::move(names))) {}

DeviceMesh::DeviceMesh(const std::string& device_type, std::vector<int64_t> ranks, std::vector<std::string> names)
    : state_(make_mesh(World::current(), device_type, {static_cast<int64_t>(ranks.size())}, ranks, std::move(names))) {}

DeviceMesh::DeviceMesh(const std::string& device_type, std::vector<std::vector<int64_t>> ranks,
                       std::vector<std::string> names) {
  std::vector<int64_t> flat;
  for (const auto& row : ranks) {
    TESSERA_CHECK(row.size() == ranks[0].size(), UsageError, "mesh rows of ", ranks[0].size(), " and ", row.size(),
                  " ranks; all rows must have equal length");
    flat.insert(flat.end(), row.begin(), row.end());
  }
  const int64_t columns = ranks.empty() ? 0 : static_cast<int64_t>(ranks[0].size());
  state_ = make_mesh(World::current(), device_type, {static_cast<int64_t>(ranks.size()), columns}, std::move(flat),
                     std::move(names));
}

DeviceMesh DeviceMesh::operator[](const std::string& name) const { return (*this)[std::vector<std::string>{name}]; }

DeviceMesh DeviceMesh::operator[](const std::vector<std::string>& names) const {
  TESSERA_CHECK(!checked_state().names.empty(), UsageError, "mesh ", *this,
                " has no axis names, so it cannot be sliced by '", c10::Join(",", names),
                "'; give names to init_device_mesh");
  if (names == state_->names) return *this;
  std::vector<int64_t> axes, shape;
  for (const auto& name : names) {
    axes.push_back(axis(name));
    shape.push_back(size(name));
    TESSERA_CHECK(axes.size() < 2 || axes[axes.size() - 2] < axes.back(), UsageError, "slice '", c10::Join(",", names),
                  "' of mesh ", *this, ": name the axes in the mesh's own order");
  }
  TESSERA_CHECK(!axes.empty(), UsageError, "slice of mesh ", *this, ": name at least one axis");
  TESSERA_CHECK(!state_->coordinate.empty(), UsageError, "rank ", state_->world.rank(), " is not in mesh ", *this,
                ", so it cannot slice it");
  auto slice = c10::make_intrusive<MeshState>();
  slice->device_type = state_->device_type;
  slice->shape = shape;
  slice->ranks = ranks_along(*state_, axes);
  slice->names = names;
  slice->world = state_->world;
  if (auto known = detail::find_interned(*slice)) return DeviceMesh(std::move(known));
  slice->root = state_->root ? state_->root : state_;
  for (int64_t axis : axes) {
    slice->groups.push_back(state_->groups[static_cast<size_t>(axis)]);
    slice->coordinate.push_back(state_->coordinate[static_cast<size_t>(axis)]);
  }
  detail::intern(slice);
  return DeviceMesh(std::move(slice));
}

DeviceMesh DeviceMesh::flatten(const std::string& name) const {
  const auto& state = checked_state();
  const std::string joined = name.empty() ? joined_name(state, all_axes(state)) : name;
  return DeviceMesh(
      make_mesh(state_->world, device_type(), {size()}, ranks(), {joined}, state_->root ? state_->root : state_));
}

DeviceMesh DeviceMesh::from_group(const comm::Group& group, const std::string& device_type, const std::string& name) {
  TESSERA_CHECK(group, UsageError, "DeviceMesh::from_group needs a group");
  at::Tensor ranks = at::empty({group->size()}, at::kLong);
  std::copy(group->ranks().begin(), group->ranks().end(), ranks.mutable_data_ptr<int64_t>());
  return from_group(std::vector<comm::Group>{group}, device_type, ranks,
                    name.empty() ? std::vector<std::string>{} : std::vector<std::string>{name});
}

DeviceMesh DeviceMesh::from_group(const std::vector<comm::Group>& groups, const std::string& device_type,
                                  const at::Tensor& ranks, std::vector<std::string> names) {
  auto state = c10::make_intrusive<MeshState>();
  state->device_type = device_type;
  state->shape = ranks.sizes().vec();
  state->ranks = read_ranks(ranks);
  state->names = std::move(names);
  state->world = World::current();
  check_shape(device_type, state->shape, state->ranks, state->names, state->world);
  TESSERA_CHECK(groups.size() == state->shape.size(), UsageError, "a mesh of ", state->shape.size(),
                " axes needs one group per axis; found ", groups.size());
  state->coordinate = find_coordinate(*state);
  TESSERA_CHECK(!state->coordinate.empty(), UsageError, "rank ", state->world.rank(),
                " is not in the mesh of these groups");
  for (int64_t axis = 0; axis < state->ndim(); axis++) {
    const auto& group = groups[static_cast<size_t>(axis)];
    const auto want = ranks_along(*state, {axis});
    TESSERA_CHECK(group && group->ranks() == want, UsageError, "from_group: ", state->axis_name(axis),
                  " of the mesh contains ranks ", c10::Join(",", want), " here; the given group has ",
                  group ? c10::str(c10::Join(",", group->ranks())) : "none");
    state->groups.push_back(group);
  }
  const auto same_groups = [&](const MeshState& known) {
    for (size_t a = 0; a < groups.size(); a++)
      if (!known.groups[a] || known.groups[a]->backend() != groups[a]->backend()) return false;
    return true;
  };
  if (auto known = detail::find_interned(*state)) {
    // An equal mesh with other groups is not shared, because the caller asked for these groups.
    if (same_groups(*known)) return DeviceMesh(std::move(known));
  } else {
    detail::intern(state);
  }
  return DeviceMesh(std::move(state));
}

void DeviceMesh::fail_no_mesh() {
  TESSERA_FAIL(UsageError, "this DeviceMesh is empty: it was default-constructed; make one with init_device_mesh");
}

int64_t DeviceMesh::size() const { return static_cast<int64_t>(checked_state().ranks.size()); }
int64_t DeviceMesh::size(const Axis& which) const { return checked_state().shape[static_cast<size_t>(axis(which))]; }

at::Tensor DeviceMesh::mesh() const {
  at::Tensor ranks = at::empty(checked_state().shape, at::kLong);
  std::copy(state_->ranks.begin(), state_->ranks.end(), ranks.mutable_data_ptr<int64_t>());
  return ranks;
}

int64_t DeviceMesh::axis(const Axis& which) const {
  if (const auto* index = std::get_if<int64_t>(&which)) {
    const int64_t axis = *index < 0 ? *index + ndim() : *index;
    TESSERA_CHECK(axis >= 0 && axis < ndim(), UsageError, "mesh ", *this, " has ", ndim(), " axes; axis ", *index,
                  " was asked for");
    return axis;
  }
  const auto& name = std::get<std::string>(which);
  const auto& known = checked_state().names;
  auto place = std::find(known.begin(), known.end(), name);
  TESSERA_CHECK(place != known.end(), UsageError, "mesh ", *this, " has no axis '", name, "'; ",
                known.empty() ? "its axes have no names" : c10::str("it has ", c10::Join(", ", known)));
  return place - known.begin();
}

comm::Group DeviceMesh::get_group(std::optional<Axis> which) const {
  TESSERA_CHECK(which || ndim() == 1, UsageError, "get_group() on mesh ", *this, ": name one of its ", ndim(), " axes");
  TESSERA_CHECK(!checked_state().coordinate.empty(), UsageError, "rank ", state_->world.rank(), " is not in mesh ",
                *this);
  return state_->groups[static_cast<size_t>(which ? axis(*which) : 0)];
}

int64_t DeviceMesh::get_rank() const { return checked_state().world.rank(); }

int64_t DeviceMesh::get_local_rank(std::optional<Axis> which) const {
  TESSERA_CHECK(which || ndim() == 1, UsageError, "get_local_rank() on mesh ", *this, ": name one of its ", ndim(),
                " axes");
  TESSERA_CHECK(!checked_state().coordinate.empty(), UsageError, "rank ", state_->world.rank(), " is not in mesh ",
                *this);
  return state_->coordinate[static_cast<size_t>(which ? axis(*which) : 0)];
}

std::optional<std::vector<int64_t>> DeviceMesh::get_coordinate() const {
  if (checked_state().coordinate.empty()) return {};
  return state_->coordinate;
}

bool DeviceMesh::operator==(const DeviceMesh& other) const {
  if (state_ == other.state_) return true;
  return state_ && other.state_ && detail::same_mesh(*state_, *other.state_);
}

size_t DeviceMesh::hash() const {
  if (!state_) return 0;
  uint64_t h = std::hash<std::string>()(state_->device_type);
  for (int64_t extent : state_->shape) h = hash_combine(h, static_cast<uint64_t>(extent));
  for (int64_t rank : state_->ranks) h = hash_combine(h, static_cast<uint64_t>(rank));
  for (const auto& name : state_->names) h = hash_combine(h, std::hash<std::string>()(name));
  return h;
}

bool DeviceMesh::has_current() { return !scopes.empty(); }
DeviceMesh DeviceMesh::current() {
  TESSERA_CHECK(has_current(), UsageError,
                "no mesh is given and this thread has no current mesh; pass one, or open a MeshScope");
  return scopes.back();
}
MeshScope::MeshScope(DeviceMesh mesh) { scopes.push_back(std::move(mesh)); }
MeshScope::~MeshScope() { scopes.pop_back(); }

DeviceMesh init_device_mesh(const std::string& device_type, std::vector<int64_t> shape,
                            std::vector<std::string> names) {
  return init_device_mesh(World::current(), device_type, std::move(shape), std::move(names));
}
DeviceMesh init_device_mesh(const World& world, const std::string& device_type, std::vector<int64_t> shape,
                            std::vector<std::string> names) {
  const int64_t count = product(shape);
  TESSERA_CHECK(count <= world.size(), UsageError, "mesh of shape ", c10::Join("x", shape), " needs ", count,
                " ranks; the world has ", world.size());
  std::vector<int64_t> ranks(static_cast<size_t>(std::max<int64_t>(count, 0)));
  std::iota(ranks.begin(), ranks.end(), 0);
  return DeviceMesh(make_mesh(world, device_type, std::move(shape), std::move(ranks), std::move(names)));
}

}  // namespace tessera
