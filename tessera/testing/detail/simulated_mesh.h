#pragma once
#include "tessera/placement/placement.h"
#include "tessera/placement/detail/shard.h"

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

// A mesh whose ranks are entries of a vector: what each would hold of a tensor, and what they hold together. No
// communication; for tests of rules.
namespace tessera::testing {

// The locals of all ranks, in row-major order of their coordinates. A Partial becomes random terms: of a sum they add
// up, of a maximum one of them is it, of a mask one rank has the element. Locals lie in memory in the order of the
// tensor's dims.
std::vector<at::Tensor> scatter(const at::Tensor& whole, PlacementsRef placements, c10::IntArrayRef mesh_shape);

struct Joined {
  at::Tensor whole;
  std::string problem;  // why the locals are not pieces of one tensor; empty if they are
};

// The inverse, up to rounding. `sizes`: of the whole.
Joined join(const std::vector<at::Tensor>& locals, PlacementsRef placements, c10::IntArrayRef mesh_shape,
            c10::IntArrayRef sizes);

// Coordinates of rank r.
std::vector<int64_t> coordinate_of(int64_t rank, c10::IntArrayRef mesh_shape);

// "" if they agree within 1e-6 (1e-4 for float), else the first element that does not, with both numbers.
std::string difference(const at::Tensor& want, const at::Tensor& got);

}  // namespace tessera::testing
