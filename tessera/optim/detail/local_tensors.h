#pragma once
#include "tessera/dtensor/dtensor.h"

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <vector>

// Optimizers are elementwise: what they do to a distributed tensor they do to this rank's piece of it, and no rank
// needs to hear of the others. So lists may mix plain tensors and tensors of any meshes: below here all are plain.
namespace tessera::optim {

using Tensors = std::vector<at::Tensor>;

namespace detail {

using tessera::detail::local_or_self;
Tensors local_tensors_of(const Tensors& tensors);

// Both plain, or on one mesh with the same placements.
bool same_placement(const at::Tensor& a, const at::Tensor& b);

// Communicates where it must: explicitly, so CommPolicy::Error does not mind. Requires: both plain, or of one mesh.
at::Tensor redistribute_like(const at::Tensor& t, const at::Tensor& like);
at::Tensor without_partial(const at::Tensor& t);  // sums that were not yet taken are: P becomes R
// The gradients that are there. Partial ones are summed, and the sum is put in their place: who comes next need not.
Tensors summed_gradients(const Tensors& parameters);

// Writes to a piece do not show in the version of the distributed tensor, by which autograd and checkpointing know that
// a value has changed. This makes them show. `piece_too`: fused kernels count no version at all.
void mark_written(const at::Tensor& t, bool piece_too = false);

// A number as a tensor of the type in which kernels compute on `pieces`. The foreach ops of the CPU round a number to
// bfloat16 before they multiply by it; this they do not, and neither do ops on single tensors, or on CUDA.
at::Tensor number_for(const Tensors& pieces, double number);

// Indices of tensors that one foreach or fused call may take together, in order of first appearance. The first form:
// of n tensors that piece(i) gives.
template <class Piece>
std::vector<std::vector<size_t>> by_device_and_dtype(size_t n, Piece&& piece) {
  std::vector<std::vector<size_t>> groups;
  for (size_t i = 0; i < n; i++) {
    const auto found = std::find_if(groups.begin(), groups.end(), [&](const auto& group) {  // hardly ever more than two
      return piece(group[0]).scalar_type() == piece(i).scalar_type() && piece(group[0]).device() == piece(i).device();
    });
    if (found != groups.end())
      found->push_back(i);
    else
      groups.emplace_back().reserve(n), groups.back().push_back(i);
  }
  return groups;
}
inline std::vector<std::vector<size_t>> by_device_and_dtype(const Tensors& pieces) {
  return by_device_and_dtype(pieces.size(), [&](size_t i) -> const at::Tensor& { return pieces[i]; });
}

}  // namespace detail
}  // namespace tessera::optim
