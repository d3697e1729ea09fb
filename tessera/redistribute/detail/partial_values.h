#pragma once
#include "tessera/placement/placement.h"

#include <ATen/core/Tensor.h>

// Partial values in collectives: what each rank sends, which reduction is used, and how the result is converted back.
//
//   placement       sent           reduced by   then
//   P(avg)          x / n          sum                          integers:  x, sum, / n rounded down
//   P(norm,p)       x ^ p          sum          ^ 1/p           p = inf:   x, max;  p = -inf: x, min
//   P(mask)         x              sum
//   P(op)           x              op
namespace tessera::redistribute::detail {

ReduceOp wire_op(const Placement& partial);
at::Tensor to_wire(const at::Tensor& x, const Placement& partial, int64_t ranks);
bool needs_from_wire(const Placement& partial, c10::ScalarType dtype);
at::Tensor from_wire(const at::Tensor& reduced, const Placement& partial, int64_t ranks);

// The partial value of rank `rank` for a value that every rank has: P(sum) and P(norm,p).
at::Tensor make_partial(const at::Tensor& value, const Placement& partial, int64_t ranks, int64_t rank);

}  // namespace tessera::redistribute::detail
