#pragma once
#include "tessera/placement/detail/shard.h"
#include "tessera/placement/placement.h"

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

// A mesh whose ranks are entries of a vector. It computes the local tensors of every rank, and the global tensor from
// these. It does not communicate. The rule oracle uses it.
namespace tessera::testing {

// The local tensors of all ranks, in row-major order of their coordinates. A Partial placement splits the values at
// random: the values of the ranks add up for a sum, one rank has the maximum for a max, one rank has each element for a
// mask. Local tensors have the memory order of the global tensor's dims, and its device.
std::vector<at::Tensor> scatter(const at::Tensor& global, PlacementsRef placements, c10::IntArrayRef mesh_shape);

struct GatherResult {
  at::Tensor global;
  std::string problem;  // why the local tensors do not form one global tensor; empty if they do
};

// The inverse of scatter(), up to rounding, on the CPU. `sizes` are the global sizes; `computed_in` as in difference().
GatherResult gather(const std::vector<at::Tensor>& locals, PlacementsRef placements, c10::IntArrayRef mesh_shape,
                    c10::IntArrayRef sizes, at::ScalarType computed_in = at::ScalarType::Undefined);

// The mesh coordinates of a rank.
std::vector<int64_t> coordinate_of(int64_t rank, c10::IntArrayRef mesh_shape);

// "" if the tensors agree within 1e-6 (float: 1e-4, half: 4e-3, bfloat16: 2e-2). Otherwise the first element that
// differs, with both values. `computed_in`: the dtype of an operand that has fewer digits; undefined: that of `want`.
// Terms of a partial half or bfloat16 tensor are rounded, so the tolerance grows with the largest element of `want`.
std::string difference(const at::Tensor& want, const at::Tensor& got,
                       at::ScalarType computed_in = at::ScalarType::Undefined);

}  // namespace tessera::testing
