#include "tessera/redistribute/detail/partial_values.h"

#include <ATen/ops/clone.h>
#include <ATen/ops/div.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/pow.h>
#include <ATen/ops/zeros_like.h>

#include <cmath>

namespace tessera::redistribute::detail {
namespace {

bool is_powered(const Placement& terms) {
  return terms.kind == Placement::Kind::NormPartial && !std::isinf(terms.norm);
}

bool divides_exactly(c10::ScalarType dtype) { return !c10::isIntegralType(dtype, /*includeBool=*/true); }

}  // namespace

ReduceOp wire_op(const Placement& terms) {
  if (terms.kind == Placement::Kind::NormPartial)
    return !std::isinf(terms.norm) ? ReduceOp::Sum : terms.norm > 0 ? ReduceOp::Max : ReduceOp::Min;
  if (terms.kind == Placement::Kind::MaskPartial || terms.op == ReduceOp::Avg) return ReduceOp::Sum;
  return terms.op;
}

at::Tensor to_wire(const at::Tensor& x, const Placement& terms, int64_t ranks) {
  if (is_powered(terms)) return at::pow(x, terms.norm);
  if (terms.is_partial(ReduceOp::Avg) && divides_exactly(x.scalar_type())) return at::div(x, ranks);
  return x;
}

bool needs_from_wire(const Placement& terms, c10::ScalarType dtype) {
  return is_powered(terms) || (terms.is_partial(ReduceOp::Avg) && !divides_exactly(dtype));
}

at::Tensor from_wire(const at::Tensor& reduced, const Placement& terms, int64_t ranks) {
  if (is_powered(terms)) return at::pow(reduced, 1 / terms.norm);
  return at::div(reduced, ranks, "floor");
}

at::Tensor make_term(const at::Tensor& value, const Placement& terms, int64_t ranks, int64_t rank) {
  if (is_powered(terms)) return at::mul(value, std::pow(static_cast<double>(ranks), -1 / terms.norm));
  if (divides_exactly(value.scalar_type())) return at::div(value, ranks);
  return rank == 0 ? at::clone(value) : at::zeros_like(value);  // 1/n of an integer is none
}

}  // namespace tessera::redistribute::detail
