#pragma once
#include "tessera/dtensor/detail/meta.h"
#include "tessera/redistribute/detail/execute.h"

// Differentiable conversions between plain tensors and DTensors, and differentiable redistribution (PyTorch:
// _FromTorchTensor, _ToTorchTensor, Redistribute). Their communication is explicit, so CommPolicy does not apply.
namespace tessera::detail {

at::Tensor from_local(const at::Tensor& local, const SpecRef& spec);
at::Tensor to_local(const at::Tensor& t, PlacementsRef grad_placements);
at::Tensor redistribute(const at::Tensor& t, PlacementsRef placements);
// to_local(redistribute(t, placements)). On a mesh of one rank, and for unchanged placements, it is one autograd node.
at::Tensor redistribute_to_local(const at::Tensor& t, PlacementsRef placements);

// Redistribution below autograd. An OpObserver gets `is_explicit`.
at::Tensor redistribute_no_grad(const at::Tensor& t, const SpecRef& to, bool is_explicit = true);

// `local` with the memory order of the spec's strides, copied if its own order differs. Needed for a transposed or
// expanded gradient, because readers rely on the global strides. Differentiable.
at::Tensor match_strides(const at::Tensor& local, const TensorSpec& spec);

// The placements of the gradient in the backward of a redistribution, for each mesh axis:
//   value was sharded    -> the same shard
//   value was replicated -> replicated, or partial if the gradient arrives as partial
//   value was partial    -> replicated: each rank's partial value has the gradient of the sum
Placements gradient_placements(PlacementsRef value, PlacementsRef gradient);

}  // namespace tessera::detail
