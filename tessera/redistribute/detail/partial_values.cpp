#include "tessera/redistribute/detail/partial_values.h"

#include <ATen/ops/clone.h>
#include <ATen/ops/div.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/pow.h>
#include <ATen/ops/zeros_like.h>

#include <cmath>

namespace tessera::redistribute::detail {
namespace {

bool is_powered(const Placement& partial) {
  return partial.kind == Placement::Kind::NormPartial && !std::isinf(partial.norm);
}

bool divides_exactly(c10::ScalarType dtype) { return !c10::isIntegralType(dtype, /*includeBool=*/true); }

}  // namespace

ReduceOp wire_op(const Placement& partial) {
  if (partial.kind == Placement::Kind::NormPartial)
    return !std::isinf(partial.norm) ? ReduceOp::Sum : partial.norm > 0 ? ReduceOp::Max : ReduceOp::Min;
  if (partial.kind == Placement::Kind::MaskPartial || partial.op == ReduceOp::Avg) return ReduceOp::Sum;
  return partial.op;
}

at::Tensor to_wire(const at::Tensor& x, const Placement& partial, int64_t ranks) {
  if (is_powered(partial)) return at::pow(x, partial.norm);
  if (partial.is_partial(ReduceOp::Avg) && divides_exactly(x.scalar_type())) return at::div(x, ranks);
  return x;
}

bool needs_from_wire(const Placement& partial, c10::ScalarType dtype) {
  return is_powered(partial) || (partial.is_partial(ReduceOp::Avg) && !divides_exactly(dtype));
}

at::Tensor from_wire(const at::Tensor& reduced, const Placement& partial, int64_t ranks) {
  if (is_powered(partial)) return at::pow(reduced, 1 / partial.norm);
  return at::div(reduced, ranks, "floor");
}

at::Tensor make_partial(const at::Tensor& value, const Placement& partial, int64_t ranks, int64_t rank) {
  if (is_powered(partial)) return at::mul(value, std::pow(static_cast<double>(ranks), -1 / partial.norm));
  if (divides_exactly(value.scalar_type())) return at::div(value, ranks);
  return rank == 0 ? at::clone(value) : at::zeros_like(value);  // integers cannot be divided by n
}

}  // namespace tessera::redistribute::detail
