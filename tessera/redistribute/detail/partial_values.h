#pragma once
#include "tessera/placement/placement.h"

#include <ATen/core/Tensor.h>

// Partial values on the wire: what is sent instead of a term, how it is reduced, what the result means.
//
//   placement       sent           reduced by   then
//   P(avg)          x / n          sum                          integers:  x, sum, / n rounded down
//   P(norm,p)       x ^ p          sum          ^ 1/p           p = inf:   x, max;  p = -inf: x, min
//   P(mask)         x              sum
//   P(op)           x              op
namespace tessera::redistribute::detail {

ReduceOp wire_op(const Placement& terms);
at::Tensor to_wire(const at::Tensor& x, const Placement& terms, int64_t ranks);
bool needs_from_wire(const Placement& terms, c10::ScalarType dtype);
at::Tensor from_wire(const at::Tensor& reduced, const Placement& terms, int64_t ranks);

// The term of rank `rank` for a value that every rank has: P(sum) and P(norm,p).
at::Tensor make_term(const at::Tensor& value, const Placement& terms, int64_t ranks, int64_t rank);

}  // namespace tessera::redistribute::detail
