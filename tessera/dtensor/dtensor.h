#pragma once
#include "tessera/dtensor/detail/meta.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/placement/placement.h"

#include <ATen/core/Tensor.h>

#include <iosfwd>
#include <optional>
#include <vector>

// Distributed tensors (PyTorch: torch.distributed.tensor).
namespace tessera {

// Options of DTensor::from_local.
struct FromLocalOptions {
  // Compare shapes across ranks, and broadcast the first rank's values to its replicas.
  bool run_check = false;
  // The global shape and stride: give both or neither. Needed if local tensors differ in size between ranks. Without
  // them the global size of a sharded dim is the local size times the number of ranks.
  std::optional<std::vector<int64_t>> shape = {}, stride = {};
};

// A tensor that is distributed over a device mesh (PyTorch: DTensor). It is an at::Tensor with global sizes and works
// wherever an at::Tensor does. This handle adds the methods that only a distributed tensor has. Any at::Tensor for
// which is_dtensor() is true converts to it.
//
// Example:  auto w = distribute_tensor(weight, mesh, {Replicate(), Shard(0)});
//           at::Tensor y = torch::mm(x, w.t());        // stays distributed
//           at::Tensor plain = DTensor(y).full_tensor();
class DTensor : public at::Tensor {
 public:
  // An undefined tensor. Every method that this class adds throws UsageError for it.
  DTensor() = default;
  // A handle to the same tensor. Throws UsageError if `t` is plain.
  DTensor(const at::Tensor& t);  // NOLINT(google-explicit-constructor)

  // A DTensor whose local tensor on this rank is `local`. Shares its memory. Communicates only with run_check.
  // Differentiable. No placements: Replicate on every axis.
  static DTensor from_local(const at::Tensor& local, const DeviceMesh& mesh, PlacementsRef placements = {},
                            FromLocalOptions options = {});

  // This rank's local tensor. Shares memory. Differentiable: the incoming gradient is taken to have the placements of
  // this tensor, or grad_placements if given. The local tensor of a view that communicated is a copy, as in PyTorch: a
  // write to it does not reach the base of the view.
  at::Tensor to_local(PlacementsRef grad_placements = {}) const;
  // The same value in other placements. Differentiable. The target must not be Partial, except on axes that already
  // are.
  DTensor redistribute(PlacementsRef placements) const;
  // The same, for code that passes the mesh as PyTorch does. `mesh` must be the tensor's mesh.
  DTensor redistribute(const DeviceMesh& mesh, PlacementsRef placements) const;
  // The global value as a plain tensor, on every rank. Differentiable.
  at::Tensor full_tensor(PlacementsRef grad_placements = {}) const;

  // One placement per mesh axis.
  PlacementsRef placements() const { return spec().placements; }
  // The mesh over which the tensor is distributed.
  DeviceMesh device_mesh() const { return spec().mesh; }
  // Mesh, placements, global and local sizes, dtype and device.
  const TensorSpec& spec() const {
    if (C10_UNLIKELY(!is_dtensor(*this))) fail_not_distributed();
    return *detail::meta_of(*this).spec;
  }

 private:
  [[noreturn]] void fail_not_distributed() const;
};

// Options of distribute_tensor.
struct DistributeOptions {
  // The rank along each mesh axis whose values are distributed. std::nullopt: every rank takes its shard of its own
  // values, without communication.
  std::optional<int64_t> src_data_rank = 0;
};
// Distributes a plain tensor over the mesh: scatters shards and broadcasts replicas from the first rank of each axis.
// Requires a leaf tensor; keeps requires_grad. Returns a DTensor with these placements as it is. For a tensor on the
// meta device nothing is communicated, and the local tensor is on the meta device too.
DTensor distribute_tensor(const at::Tensor& t, const DeviceMesh& mesh, PlacementsRef placements = {},
                          DistributeOptions options = {});

// Makes a parameter or buffer distributed in place: every handle to it, in modules and optimizers, sees the DTensor.
void distribute_in_place(at::Tensor& t, const DeviceMesh& mesh, PlacementsRef placements,
                         DistributeOptions options = {});

// Factories. Each rank allocates only its local tensor. Random values depend on the global index, so they are the same
// on every mesh. No placements: Replicate on every axis.
DTensor zeros(c10::IntArrayRef size, const DeviceMesh& mesh, PlacementsRef placements = {},
              at::TensorOptions options = {});
DTensor ones(c10::IntArrayRef size, const DeviceMesh& mesh, PlacementsRef placements = {},
             at::TensorOptions options = {});
DTensor empty(c10::IntArrayRef size, const DeviceMesh& mesh, PlacementsRef placements = {},
              at::TensorOptions options = {});
DTensor full(c10::IntArrayRef size, const at::Scalar& value, const DeviceMesh& mesh, PlacementsRef placements = {},
             at::TensorOptions options = {});
DTensor rand(c10::IntArrayRef size, const DeviceMesh& mesh, PlacementsRef placements = {},
             at::TensorOptions options = {});
DTensor randn(c10::IntArrayRef size, const DeviceMesh& mesh, PlacementsRef placements = {},
              at::TensorOptions options = {});
DTensor arange(const at::Scalar& end, const DeviceMesh& mesh, PlacementsRef placements = {},
               at::TensorOptions options = {});

// Prints dtype, sizes, placements, mesh and this rank's local tensor, without communication:
//   DTensor(f32[8, 10][S(0), R] on mesh(dp=2,tp=2))
//   local tensor of rank 3, [4, 10]: ...
// For the global value print full_tensor().
std::ostream& operator<<(std::ostream& out, const DTensor& t);

}  // namespace tessera
