#pragma once
#include "tessera/dtensor/detail/meta.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/placement/placement.h"

#include <ATen/core/Tensor.h>

#include <iosfwd>
#include <optional>
#include <vector>

namespace tessera {

struct FromLocalOptions {
  // Compare shapes across ranks, and make replicas equal to the first rank's by a broadcast.
  bool run_check = false;
  // The global geometry, both or neither. Needed where pieces are uneven: without it, local size times ranks.
  std::optional<std::vector<int64_t>> shape = {}, stride = {};
};

// A tensor laid out over a mesh. It is an at::Tensor, with global sizes, and works wherever one does; this handle adds
// what only a distributed tensor has. Any at::Tensor for which is_dtensor() holds converts to it.
//
// Example:  auto w = distribute_tensor(weight, mesh, {Replicate(), Shard(0)});
//           at::Tensor y = torch::mm(x, w.t());        // stays distributed
//           auto whole = DTensor(y).full_tensor();
class DTensor : public at::Tensor {
 public:
  DTensor() = default;
  DTensor(const at::Tensor& t);  // throws UsageError if t is plain  NOLINT(google-explicit-constructor)

  // Says that `local` is this rank's piece. Shares its memory, communicates nothing (but see run_check),
  // differentiable.
  static DTensor from_local(const at::Tensor& local, const DeviceMesh& mesh, PlacementsRef placements = {},
                            FromLocalOptions options = {});

  // This rank's piece, sharing memory; differentiable. The gradient that comes back is taken to lie like the tensor
  // does, or as grad_placements say.
  at::Tensor to_local(PlacementsRef grad_placements = {}) const;
  // The same value elsewhere; differentiable. Partial is no target: a sum that is not yet taken cannot be asked for.
  DTensor redistribute(PlacementsRef placements) const;
  DTensor redistribute(const DeviceMesh& mesh, PlacementsRef placements) const;
  // The whole value as a plain tensor, on every rank; differentiable.
  at::Tensor full_tensor(PlacementsRef grad_placements = {}) const;

  PlacementsRef placements() const { return spec().placements; }
  DeviceMesh device_mesh() const { return spec().mesh; }
  const TensorSpec& spec() const { return *detail::meta_of(*this).spec; }
};

struct DistributeOptions {
  // The rank along each axis whose values count; none: every rank keeps its own piece of what it has, no communication.
  std::optional<int64_t> src_data_rank = 0;
};
// Lays a plain tensor out over the mesh. The first rank of each axis is the source of truth: pieces are scattered,
// replicas broadcast. Leaf tensors only; requires_grad is kept. A DTensor that already lies so is returned as it is.
// A tensor on the meta device has no values to send: nothing is communicated, and the piece is one on meta, too.
DTensor distribute_tensor(const at::Tensor& t, const DeviceMesh& mesh, PlacementsRef placements = {},
                          DistributeOptions options = {});

// Turns a parameter or buffer into a distributed one in place: every handle to it, in modules and optimizers, sees it.
void distribute_in_place(at::Tensor& t, const DeviceMesh& mesh, PlacementsRef placements,
                         DistributeOptions options = {});

// Each rank builds only its piece. Random ones draw by global index: the same numbers on every mesh.
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

// Float[8, 10] [S(0), R] on mesh(dp=2,tp=2); the values are full_tensor()'s or to_local()'s to print.
std::ostream& operator<<(std::ostream& out, const DTensor& t);

}  // namespace tessera
