#pragma once
#include "tessera/mesh/device_mesh.h"
#include "tessera/placement/placement.h"
#include "tessera/placement/detail/shard.h"
#include "tessera/placement/detail/dtensor_impl.h"

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>
#include <c10/util/intrusive_ptr.h>

#include <mutex>
#include <vector>

namespace tessera {

// Everything about a distributed tensor but its data, as one rank sees it. Immutable and interned per mesh: equal specs
// are one object, so comparing pointers compares specs, and a cache key needs no more than the pointer.
// Strides are those of the global tensor and come from global metadata alone, never from a local tensor: uneven pieces
// would otherwise give ranks different specs, then different decisions, then a deadlock.
struct TensorSpec final : c10::intrusive_ptr_target {
  DeviceMesh mesh;
  Placements placements;  // one a mesh axis; dims are not negative
  Sizes sizes, strides;   // global
  c10::ScalarType dtype;
  c10::Device device;
  Sizes local_sizes;  // this rank's
  uint64_t hash;
  c10::intrusive_ptr<DTensorImpl> stamp;  // an impl with the global geometry, copied for each new tensor

  TensorSpec(DeviceMesh mesh, PlacementsRef placements, c10::IntArrayRef sizes, c10::IntArrayRef strides,
             c10::ScalarType dtype, c10::Device device, uint64_t hash);
  int64_t numel() const;  // global
  int64_t local_bytes() const;
  Runs runs(int64_t dim) const;  // global indices this rank holds of a dim
  // The same for all dims as one list, as registered ops take it: dim after dim, the number of runs, then begin, end of
  // each. Empty where no dim is cut. Made at first use.
  const std::vector<int64_t>& run_list() const;
  bool has_partial() const;
  std::string brief() const;     // f32[8, 10][S(0), R]
  std::string describe() const;  // f32[8, 10][S(0), R] on mesh(dp=2,tp=2)

  void release_resources() override;  // the table's weak reference must not keep the mesh, which owns the table

 private:
  mutable std::once_flag run_list_made_;
  mutable std::vector<int64_t> run_list_;
};

using SpecRef = c10::intrusive_ptr<const TensorSpec>;

// Finds or makes the spec. Requires: placements normalised, one a mesh axis (UsageError otherwise).
// S(d,b) whose pieces are those of S(d) becomes S(d), so that specs that lie alike are one.
SpecRef intern(const DeviceMesh& mesh, PlacementsRef placements, c10::IntArrayRef sizes, c10::IntArrayRef strides,
               c10::ScalarType dtype, c10::Device device);
// Entries of the mesh's table: live specs, and dead ones that were not swept yet (no more than live ones, or 64).
size_t interned_count(const DeviceMesh& mesh);
SpecRef with_placements(const TensorSpec& spec, PlacementsRef placements);

Sizes contiguous_strides(c10::IntArrayRef sizes);
// Strides of a dense tensor of `sizes` whose dims lie in memory in the order of `like`'s.
Sizes strides_in_order_of(c10::IntArrayRef sizes, c10::IntArrayRef like);

}  // namespace tessera
