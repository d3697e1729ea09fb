#pragma once
#include "tessera/mesh/device_mesh.h"
#include "tessera/placement/detail/dtensor_impl.h"
#include "tessera/placement/detail/shard.h"
#include "tessera/placement/placement.h"

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>
#include <c10/util/intrusive_ptr.h>

#include <mutex>
#include <vector>

namespace tessera {

// The metadata of a distributed tensor on one rank (PyTorch: DTensorSpec). Immutable and interned per mesh: equal specs
// are one object. So specs are compared by pointer, and a cache key contains only the pointer.
// Strides are those of the global tensor. They are computed from global metadata only, never from a local tensor.
// Otherwise uneven shards would give ranks different specs, then different decisions, then a deadlock.
struct TensorSpec final : c10::intrusive_ptr_target {
  DeviceMesh mesh;
  Placements placements;  // one per mesh axis; dims are not negative
  Sizes sizes, strides;   // global
  c10::ScalarType dtype;
  c10::Device device;
  Sizes local_sizes;  // of this rank's local tensor
  uint64_t hash;
  c10::intrusive_ptr<DTensorImpl> prototype;  // an impl with the global geometry, copied for each new tensor

  TensorSpec(DeviceMesh mesh, PlacementsRef placements, c10::IntArrayRef sizes, c10::IntArrayRef strides,
             c10::ScalarType dtype, c10::Device device, uint64_t hash);
  int64_t numel() const;  // global
  int64_t local_bytes() const;
  IndexRanges local_ranges(int64_t dim) const;  // global indices of a dim that this rank has
  // The ranges of all dims in one list, which registered ops take as an argument. For each dim: the number of ranges,
  // then begin and end of each. Empty if no dim is sharded. Computed on first use.
  const std::vector<int64_t>& range_list() const;
  bool has_partial() const;
  std::string brief() const;     // f32[8, 10][S(0), R]
  std::string describe() const;  // f32[8, 10][S(0), R] on mesh(dp=2,tp=2)

  // Frees the mesh. The weak reference of the mesh's spec table must not keep the mesh alive.
  void release_resources() override;

 private:
  mutable std::once_flag range_list_made_;
  mutable std::vector<int64_t> range_list_;
};

using SpecRef = c10::intrusive_ptr<const TensorSpec>;

// Finds or creates the spec. Requires: normalized placements, one per mesh axis (UsageError otherwise).
// S(d,b) becomes S(d) where both give the same shards, so that equal shardings have one spec.
SpecRef intern(const DeviceMesh& mesh, PlacementsRef placements, c10::IntArrayRef sizes, c10::IntArrayRef strides,
               c10::ScalarType dtype, c10::Device device);
// Number of entries in the mesh's spec table: live specs, and dead ones that are not yet removed (at most as many as
// live ones, or 64).
size_t interned_count(const DeviceMesh& mesh);
SpecRef with_placements(const TensorSpec& spec, PlacementsRef placements);

Sizes contiguous_strides(c10::IntArrayRef sizes);
// Strides of a dense tensor of `sizes` whose dims have the memory order of the strides `like`.
Sizes strides_in_order_of(c10::IntArrayRef sizes, c10::IntArrayRef like);

}  // namespace tessera
