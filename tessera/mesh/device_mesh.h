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

// An object that an upper layer stores in a mesh, one per slot: interned specs, decisions, plans.
struct MeshAttachment {
  virtual ~MeshAttachment() = default;
  virtual void clear() = 0;  // empties its caches; called when the world is destroyed
};
enum class MeshSlot : uint8_t { Specs, Decisions, Plans, Count };

// The state of a mesh on one rank. Equal meshes on one rank share one state. So meshes are compared by pointer and
// share their caches.
struct MeshState : c10::intrusive_ptr_target {
  std::string device_type;
  std::vector<int64_t> shape;
  std::vector<int64_t> ranks;       // row-major over shape, global ranks
  std::vector<std::string> names;   // empty, or one per axis
  std::vector<int64_t> coordinate;  // of this rank; empty if it is not in the mesh
  std::vector<comm::Group> groups;  // one per axis; null if this rank is not in the mesh
  World world;
  c10::intrusive_ptr<MeshState> root;  // the mesh that this one is a slice or flattening of, or null
  std::array<std::unique_ptr<MeshAttachment>, static_cast<size_t>(MeshSlot::Count)> attachments;

  int64_t ndim() const { return static_cast<int64_t>(shape.size()); }
  std::string axis_name(int64_t axis) const;  // "tp", or "axis 1" in a mesh without names
  // The group over several axes (ascending). It is created on first use, so every rank of the mesh must call this.
  comm::Group joint_group(const std::vector<int64_t>& axes);

 private:
  std::vector<std::pair<std::vector<int64_t>, comm::Group>> joint_groups_;
};

}  // namespace detail

// Ranks arranged as an n-dimensional array with named axes (PyTorch: DeviceMesh). It is a handle: copies share the
// state.
// Example:  auto mesh = init_device_mesh("cpu", {2, 4}, {"dp", "tp"});   // mesh["tp"].size() == 4
class DeviceMesh {
 public:
  // An axis, by index or by name.
  using Axis = std::variant<int64_t, std::string>;

  // No mesh: operator bool gives false, everything else throws UsageError.
  DeviceMesh() = default;
  // A mesh of the given ranks: an integer CPU tensor of any shape, or nested lists. Every rank of the world must
  // construct it.
  DeviceMesh(const std::string& device_type, const at::Tensor& ranks, std::vector<std::string> names = {});
  DeviceMesh(const std::string& device_type, std::vector<int64_t> ranks, std::vector<std::string> names = {});
  DeviceMesh(const std::string& device_type, std::vector<std::vector<int64_t>> ranks,
             std::vector<std::string> names = {});
  // For internal use.
  explicit DeviceMesh(c10::intrusive_ptr<detail::MeshState> state) : state_(std::move(state)) {}

  // The submesh along the named axes that contains this rank. It shares the process groups.
  DeviceMesh operator[](const std::string& name) const;
  DeviceMesh operator[](const std::vector<std::string>& names) const;
  // A 1-D mesh of all ranks, with a process group named `name` (default: the axis names joined by "_").
  DeviceMesh flatten(const std::string& name = "") const;
  // A mesh over existing process groups: 1-D, or one group per axis for the given ranks.
  static DeviceMesh from_group(const comm::Group& group, const std::string& device_type, const std::string& name = "");
  static DeviceMesh from_group(const std::vector<comm::Group>& groups, const std::string& device_type,
                               const at::Tensor& ranks, std::vector<std::string> names = {});

  explicit operator bool() const { return state_.defined(); }  // false for a default-constructed mesh
  int64_t ndim() const { return checked_state().ndim(); }      // number of axes
  int64_t size() const;                                        // number of ranks
  int64_t size(const Axis& axis) const;                        // number of ranks along one axis
  // Size of each axis.
  const std::vector<int64_t>& shape() const { return checked_state().shape; }
  // Name of each axis, or empty.
  const std::vector<std::string>& names() const { return checked_state().names; }
  // "cpu" or "cuda".
  const std::string& device_type() const { return checked_state().device_type; }
  // Global ranks in row-major order.
  const std::vector<int64_t>& ranks() const { return checked_state().ranks; }
  // The ranks as a tensor of shape().
  at::Tensor mesh() const;

  // The index of an axis. Throws UsageError that lists the names for an unknown axis.
  int64_t axis(const Axis& axis) const;
  // The process group of an axis. The axis can be omitted for a 1-D mesh.
  comm::Group get_group(std::optional<Axis> axis = {}) const;
  // The global rank.
  int64_t get_rank() const;
  // The rank within the group of an axis. The axis can be omitted for a 1-D mesh.
  int64_t get_local_rank(std::optional<Axis> axis = {}) const;
  // The coordinate of this rank, or nothing if it is not in the mesh.
  std::optional<std::vector<int64_t>> get_coordinate() const;

  // Compares ranks, shape, device type and names.
  bool operator==(const DeviceMesh& other) const;
  size_t hash() const;  // equal meshes have equal hashes
  // For internal use.
  detail::MeshState* state() const { return state_.get(); }
  const c10::intrusive_ptr<detail::MeshState>& state_ptr() const { return state_; }

  // The mesh of this thread's innermost MeshScope. current() throws UsageError without one.
  static DeviceMesh current();
  static bool has_current();

 private:
  detail::MeshState& checked_state() const {
    if (C10_UNLIKELY(!state_)) fail_no_mesh();
    return *state_;
  }
  [[noreturn]] static void fail_no_mesh();

  c10::intrusive_ptr<detail::MeshState> state_;
};

// While alive, `mesh` is the default mesh of this thread: functions without a mesh argument use it.
class MeshScope {
 public:
  // Makes it the default; the destructor restores the previous one.
  explicit MeshScope(DeviceMesh mesh);
  ~MeshScope();
  MeshScope(const MeshScope&) = delete;
};

// A mesh of ranks 0..n-1 in row-major order (PyTorch: init_device_mesh). The first form uses this thread's current
// World.
DeviceMesh init_device_mesh(const std::string& device_type, std::vector<int64_t> shape,
                            std::vector<std::string> names = {});
DeviceMesh init_device_mesh(const World& world, const std::string& device_type, std::vector<int64_t> shape,
                            std::vector<std::string> names = {});

// Prints "dp=2,tp=4", or "2x4" for a mesh without names.
std::ostream& operator<<(std::ostream& out, const DeviceMesh& mesh);

// Sizes and names of the axes of a mesh, without ranks: the value of a command-line option.
struct MeshShape {
  std::vector<int64_t> shape;
  std::vector<std::string> names;  // empty, or one per axis
  bool operator==(const MeshShape&) const = default;
};
// Reads and prints "dp=2,tp=4" or "2x4". Throws UsageError for other text.
MeshShape parse_mesh_shape(std::string_view text);
std::ostream& operator<<(std::ostream& out, const MeshShape& shape);

}  // namespace tessera

// Lets a DeviceMesh be a key of unordered containers.
template <>
struct std::hash<tessera::DeviceMesh> {
  size_t operator()(const tessera::DeviceMesh& mesh) const { return mesh.hash(); }
};
