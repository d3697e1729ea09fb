#pragma once
#include "tessera/dtensor/dtensor.h"

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <vector>

// Optimizers are elementwise: they update the local tensor of each distributed tensor, without communication. So lists
// may mix plain tensors and tensors of any meshes; the update functions only see plain local tensors.
namespace tessera::optim {

// A list of tensors: parameters, gradients or state.
using Tensors = std::vector<at::Tensor>;

namespace detail {

using tessera::detail::local_or_self;
// The local tensor of each distributed tensor; plain tensors stay.
Tensors local_tensors_of(const Tensors& tensors);

// True if both are plain, or both are on one mesh with the same placements.
bool same_placement(const at::Tensor& a, const at::Tensor& b);

// Redistributes t to the placements of `like`. CommPolicy::Error allows it, because it is explicit.
// Requires: both are plain, or both are on one mesh.
at::Tensor redistribute_like(const at::Tensor& t, const at::Tensor& like);
at::Tensor reduce_partial(const at::Tensor& t);  // redistributes Partial placements to Replicate
// The gradients of all parameters that have one. Partial gradients are reduced, and .grad is replaced by the result.
Tensors reduce_partial_gradients(const Tensors& parameters);

// Bumps the version of a distributed tensor after a write to its local tensor. Autograd and activation checkpointing
// use versions to detect writes. `local_too`: bumps the local tensor's version as well, which fused kernels do not do.
void mark_written(const at::Tensor& t, bool local_too = false);

// A number as a tensor of the dtype in which kernels compute (opmath) on these tensors. The foreach ops on the CPU
// round a plain number to bfloat16 before they multiply by it. They do not round such a tensor; neither do
// single-tensor ops or CUDA.
at::Tensor op_math_scalar(const Tensors& locals, double number);

// Groups the indices of n tensors by device and dtype, in order of first appearance: one foreach or fused call can take
// one group. tensor(i) is the tensor with index i.
template <class GetTensor>
std::vector<std::vector<size_t>> by_device_and_dtype(size_t n, GetTensor&& tensor) {
  std::vector<std::vector<size_t>> groups;
  for (size_t i = 0; i < n; i++) {
    const auto found =
        std::find_if(groups.begin(), groups.end(), [&](const auto& group) {  // rarely more than two groups
          return tensor(group[0]).scalar_type() == tensor(i).scalar_type() &&
                 tensor(group[0]).device() == tensor(i).device();
        });
    if (found != groups.end())
      found->push_back(i);
    else
      groups.emplace_back().reserve(n), groups.back().push_back(i);
  }
  return groups;
}
inline std::vector<std::vector<size_t>> by_device_and_dtype(const Tensors& tensors) {
  return by_device_and_dtype(tensors.size(), [&](size_t i) -> const at::Tensor& { return tensors[i]; });
}

// The tensors themselves in such groups.
std::vector<Tensors> lists_by_device_and_dtype(const Tensors& tensors);

}  // namespace detail
}  // namespace tessera::optim
