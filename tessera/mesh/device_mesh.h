#pragma once
#include "tessera/comm/communicator.h"
#include "tessera/comm/world.h"

#include <ATen/core/Tensor.h>

#include <array>
#include <iosfwd>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace tessera {

namespace detail {

// What upper layers keep with a mesh, one object a slot: interned specs, decisions, plans.
struct MeshAttachment {
  virtual ~MeshAttachment() = default;
  virtual void clear() = 0;  // drops what it caches; called when the world is destroyed
};
enum class MeshSlot : uint8_t { Specs, Decisions, Plans, Count };

// A mesh as one rank holds it. Meshes that are equal on one rank share one of these, so comparing pointers compares
// meshes, and their caches are shared.
struct MeshState : c10::intrusive_ptr_target {
  std::string device_type;
  std::vector<int64_t> shape;
  std::vector<int64_t> ranks;       // row-major over shape, global ranks
  std::vector<std::string> names;   // empty, or one an axis
  std::vector<int64_t> coordinate;  // this rank's place; empty if it is not in the mesh
  std::vector<comm::Group> groups;  // one an axis; null if this rank is not in the mesh
  World world;
  c10::intrusive_ptr<MeshState> root;  // what this was sliced or flattened from; null: nothing
  std::array<std::unique_ptr<MeshAttachment>, static_cast<size_t>(MeshSlot::Count)> attachments;

  int64_t ndim() const { return static_cast<int64_t>(shape.size()); }
  std::string axis_name(int64_t axis) const;  // "tp", or "axis 1" in a mesh without names
  // The group over several axes at once (ascending), made at first use: every rank of the mesh must ask.
  comm::Group joint_group(const std::vector<int64_t>& axes);

 private:
  std::vector<std::pair<std::vector<int64_t>, comm::Group>> joint_groups_;
};

}  // namespace detail

// Ranks arranged as an n-dimensional array with named axes. A handle; copies share.
// Example:  auto mesh = init_device_mesh("cpu", {2, 4}, {"dp", "tp"});   mesh["tp"].size() == 4
class DeviceMesh {
 public:
  using Axis = std::variant<int64_t, std::string>;

  DeviceMesh() = default;
  // `ranks`: an integer CPU tensor of any shape, or nested lists. Every rank of the world must construct it.
  DeviceMesh(const std::string& device_type, const at::Tensor& ranks, std::vector<std::string> names = {});
  DeviceMesh(const std::string& device_type, std::vector<int64_t> ranks, std::vector<std::string> names = {});
  DeviceMesh(const std::string& device_type, std::vector<std::vector<int64_t>> ranks,
             std::vector<std::string> names = {});
  explicit DeviceMesh(c10::intrusive_ptr<detail::MeshState> state) : state_(std::move(state)) {}

  // The part of the mesh along the named axes that holds this rank; shares the groups.
  DeviceMesh operator[](const std::string& name) const;
  DeviceMesh operator[](const std::vector<std::string>& names) const;
  // All axes as one, a new group named `name` (default: the names joined by "_").
  DeviceMesh flatten(const std::string& name = "") const;
  static DeviceMesh from_group(const comm::Group& group, const std::string& device_type, const std::string& name = "");
  static DeviceMesh from_group(const std::vector<comm::Group>& groups, const std::string& device_type,
                               const at::Tensor& ranks, std::vector<std::string> names = {});

  explicit operator bool() const { return state_.defined(); }
  int64_t ndim() const { return state_->ndim(); }
  int64_t size() const;  // number of ranks
  int64_t size(const Axis& axis) const;
  const std::vector<int64_t>& shape() const { return state_->shape; }
  const std::vector<std::string>& names() const { return state_->names; }
  const std::string& device_type() const { return state_->device_type; }
  const std::vector<int64_t>& ranks() const { return state_->ranks; }
  at::Tensor mesh() const;  // the ranks, as a tensor of shape()

  int64_t axis(const Axis& axis) const;                        // its index; throws on an unknown name, naming the known
  comm::Group get_group(std::optional<Axis> axis = {}) const;  // none: only on a 1-D mesh
  int64_t get_rank() const;                                    // global
  int64_t get_local_rank(std::optional<Axis> axis = {}) const;  // place along that axis; none: only on a 1-D mesh
  std::optional<std::vector<int64_t>> get_coordinate() const;   // none if this rank is outside

  bool operator==(const DeviceMesh& other) const;  // ranks, shape, device type, names
  size_t hash() const;
  detail::MeshState* state() const { return state_.get(); }
  const c10::intrusive_ptr<detail::MeshState>& state_ptr() const { return state_; }

  static DeviceMesh current();  // innermost MeshScope of this thread; throws UsageError if there is none
  static bool has_current();

 private:
  c10::intrusive_ptr<detail::MeshState> state_;
};

// Makes `mesh` the one used where none is given, while alive.
class MeshScope {
 public:
  explicit MeshScope(DeviceMesh mesh);
  ~MeshScope();
  MeshScope(const MeshScope&) = delete;
};

// Row-major ranks 0..n-1 over `shape`. The first form takes the thread's current World.
DeviceMesh init_device_mesh(const std::string& device_type, std::vector<int64_t> shape,
                            std::vector<std::string> names = {});
DeviceMesh init_device_mesh(const World& world, const std::string& device_type, std::vector<int64_t> shape,
                            std::vector<std::string> names = {});

// "dp=2,tp=4"; a mesh without names prints "2x4".
std::ostream& operator<<(std::ostream& out, const DeviceMesh& mesh);
struct MeshShape {
  std::vector<int64_t> shape;
  std::vector<std::string> names;
  bool operator==(const MeshShape&) const = default;
};
MeshShape parse_mesh_shape(std::string_view text);  // the inverse
std::ostream& operator<<(std::ostream& out, const MeshShape& shape);

}  // namespace tessera

template <>
struct std::hash<tessera::DeviceMesh> {
  size_t operator()(const tessera::DeviceMesh& mesh) const { return mesh.hash(); }
};
