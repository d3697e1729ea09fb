#pragma once
#include "tessera/dtensor/detail/meta.h"
#include "tessera/redistribute/detail/execute.h"

// Where plain and distributed meet, and where a value moves: each with its gradient. Explicit communication.
namespace tessera::detail {

// The piece with its dims in memory as the spec tells of them, copied if need be: a transposed or expanded gradient
// would be taken for something else by whoever reads the global strides. Differentiable.
at::Tensor in_order_of(const at::Tensor& local, const TensorSpec& spec);

at::Tensor from_local(const at::Tensor& local, const SpecRef& spec);
at::Tensor to_local(const at::Tensor& t, PlacementsRef grad_placements);
at::Tensor redistribute(const at::Tensor& t, PlacementsRef placements);

// Without autograd.
at::Tensor move(const at::Tensor& t, const SpecRef& to, bool is_explicit = true);

// Where the gradient of a redistribution goes, axis by axis:
//   the value was cut    -> cut like it          (an own piece is enough)
//   the value was whole  -> whole, or still a pending sum if it comes as one
//   the value was a sum  -> whole: every term of a sum has the gradient of the sum
Placements gradient_placements(PlacementsRef value, PlacementsRef gradient);

}  // namespace tessera::detail
