#pragma once
#include "tessera/dtensor/detail/meta.h"

// Views that communicate, because they cannot keep the sharding of their base:
// x[1] of S(0). Autograd formulas, hooks and custom functions take such views of
// gradients too. See GatheredBase.
namespace tessera::detail {

// `copy` is the local tensor of `base` in the placements of `spec`. Null if it
// shares the memory of the base.
c10::intrusive_ptr<GatheredBase> make_gathered_base(const at::Tensor& base, const at::Tensor& copy, SpecRef spec);

// True if AccumulateGrad detaches the gradient `view` to make it the .grad of a leaf. Such a .grad is a tensor of its
// own: writes to it do not reach the base. Hooks of the leaf run in the same node, before and after; a view that a hook
// made is an alias like any other.
bool becomes_grad(const at::Tensor& view);

// Takes over writes to the base. Communicates if there were any.
void refresh(GatheredBase& gathered);

// Writes the copy to the base, and to the base of that if it is a view that
// communicated too. Communicates.
void write_back(GatheredBase& gathered);

// Writes `local`, which has the placements of `spec`, to the DTensor `to`.
// Communicates if placements differ.
void copy_from_placements(const at::Tensor& to, const at::Tensor& local, const TensorSpec& spec);

}  // namespace tessera::detail
