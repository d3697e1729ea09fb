#include "tessera/base/error.h"
#include "tessera/rules/detail/elementwise.h"
#include "tessera/rules/detail/families.h"
#include "tessera/rules/detail/geometry.h"

namespace tessera::rules {

namespace {

// An in-place op cannot change the sizes of its tensor. Local ops cannot check that: local sizes may match, and some
// ops check nothing for an empty shard.
void check_written_sizes(const OpQuery& query, c10::IntArrayRef sizes) {
  const auto* written = query.schema.arguments().empty() ? nullptr : query.schema.arguments()[0].alias_info();
  if (!written || !written->isWrite() || query.tensors.empty()) return;
  TESSERA_CHECK(c10::IntArrayRef(query.tensors[0].sizes) == sizes, UsageError, query.schema.operator_name(),
                ": self has sizes ", query.tensors[0].sizes, ", which doesn't match the broadcast shape ", sizes);
}

}  // namespace

Rule elementwise(const OpQuery& query, c10::ArrayRef<PartialStrategy> partials) {
  Rule rule;
  auto sizes = broadcast_sizes(query);
  auto outs = static_cast<size_t>(fresh_outputs(query.schema));
  if (outs > 0) rule.outs.assign(outs, {sizes, pointwise_strides(sizes, query.tensors)});
  check_written_sizes(query, sizes);
  add_replicated_strategy(rule, query);
  for (int64_t d = 0; d < static_cast<int64_t>(sizes.size()); d++) {
    Placements in;
    for (const auto& tensor : query.tensors) in.push_back(broadcast_shard(tensor, sizes, d));
    rule.add_strategy(std::move(in), Placements(outs, S(d)));
  }
  for (const auto& partial : partials) {
    if (partial.in.size() != query.tensors.size()) continue;
    bool changes_written = outs == 0 && partial.in[0] != partial.out;  // an in-place op keeps its placements
    if (changes_written) continue;
    rule.add_strategy(Placements(partial.in.begin(), partial.in.end()), Placements(outs, partial.out));
  }
  return rule;
}

namespace {

// f(a + b) = f(a) + f(b), and f(0) = 0, so P(mask) is kept too.
const std::vector<PartialStrategy> kLinear = {{{Psum}, Psum}, {{Pavg}, Pavg}, {{Pmask}, Pmask}};

// Negation reverses the order: P(max) becomes P(min).
const std::vector<PartialStrategy> kNegation = {
    {{Psum}, Psum}, {{Pavg}, Pavg}, {{Pmask}, Pmask}, {{Pmax}, Pmin}, {{Pmin}, Pmax}};

// {Psum, R} is absent, because R would be added once per rank. An R operand becomes Psum by a division, without
// communication. {R, Pmax} is absent, because alpha can be negative.
const std::vector<PartialStrategy> kAddition = {
    {{Psum, Psum}, Psum}, {{Pavg, Pavg}, Pavg}, {{Pmask, Pmask}, Psum},
    {{Pavg, R}, Pavg},    {{R, Pavg}, Pavg},  // every rank adds the same R, so the avg changes by R
    {{Pmax, R}, Pmax},    {{Pmin, R}, Pmin},  // and so does the max
};

// Addition of a number is like addition of R. Psum is absent, because the number would be added once per rank.
const std::vector<PartialStrategy> kShift = {{{Pavg}, Pavg}, {{Pmax}, Pmax}, {{Pmin}, Pmin}};

// a + w * (b - a) with one w for all elements.
const std::vector<PartialStrategy> kInterpolation = {{{Psum, Psum}, Psum}, {{Pavg, Pavg}, Pavg}};

// Selects one of two values for each element, the same one on every rank.
const std::vector<PartialStrategy> kChoice = {{{R, Psum, Psum}, Psum}, {{R, Pavg, Pavg}, Pavg}};

// A product with a replicated tensor keeps a partial only if the result has one element. For a larger result it is
// cheaper to reduce first: otherwise each later use of the result would reduce it.
const std::vector<PartialStrategy> kScaledByOne = {{{Psum, R}, Psum}, {{Pavg, R}, Pavg}};
const std::vector<PartialStrategy> kProductWithOne = {
    {{Psum, R}, Psum}, {{Pavg, R}, Pavg}, {{R, Psum}, Psum}, {{R, Pavg}, Pavg}};

Rule scaled(const OpQuery& query, c10::ArrayRef<PartialStrategy> by_one) {
  bool plain_factor = query.tensors.size() == 2 && (!query.tensors[0].distributed || !query.tensors[1].distributed);
  bool one_element = numel_of(broadcast_sizes(query)) == 1;
  return elementwise(query, plain_factor || one_element ? by_one : c10::ArrayRef<PartialStrategy>{});
}

// Ops that keep partials. In-place forms have the same strategies.
const struct PointwisePartialOp {
  const char* op;
  const std::vector<PartialStrategy>& partials;
} kPointwisePartialOps[] = {
    {"add.Tensor", kAddition},       {"sub.Tensor", kAddition}, {"add.Scalar", kShift},  {"sub.Scalar", kShift},
    {"mul.Scalar", kLinear},         {"div.Scalar", kLinear},   {"neg", kNegation},      {"deg2rad", kLinear},
    {"lerp.Scalar", kInterpolation}, {"rad2deg", kLinear},      {"where.self", kChoice},
};

// Ops that keep no partial: a partial input is reduced first. Each is also registered in its in-place form, if ATen has
// one.
const char* const kPointwiseShardOnlyOps[] = {
    // one tensor
    "abs",
    "acos",
    "acosh",
    "asin",
    "asinh",
    "atan",
    "atanh",
    "angle",
    "bitwise_not",
    "ceil",
    "cos",
    "cosh",
    "digamma",
    "erf",
    "erfc",
    "erfinv",
    "exp",
    "exp2",
    "expm1",
    "floor",
    "frac",
    "hardsigmoid",
    "hardswish",
    "i0",
    "isinf",
    "isnan",
    "isneginf",
    "isposinf",
    "lgamma",
    "log",
    "log10",
    "log1p",
    "log2",
    "logical_not",
    "mish",
    "reciprocal",
    "relu",
    "round",
    "round.decimals",
    "rsqrt",
    "sgn",
    "sigmoid",
    "sign",
    "signbit",
    "silu",
    "sin",
    "sinc",
    "sinh",
    "sqrt",
    "tan",
    "tanh",
    "trunc",
    "nan_to_num",
    "logit",
    "special_entr",
    "special_erfcx",
    "special_i0e",
    "special_i1",
    "special_i1e",
    "special_log_ndtr",
    "special_ndtri",
    "special_airy_ai",
    "special_bessel_j0",
    "special_bessel_j1",
    "special_bessel_y0",
    "special_bessel_y1",
    "special_modified_bessel_i0",
    "special_modified_bessel_i1",
    "special_modified_bessel_k0",
    "special_modified_bessel_k1",
    "special_scaled_modified_bessel_k0",
    "special_scaled_modified_bessel_k1",
    "special_spherical_bessel_j0",
    "polygamma",
    "frexp.Tensor",
    // activations with parameters
    "celu",
    "elu",
    "gelu",
    "hardshrink",
    "hardtanh",
    "leaky_relu",
    "softplus",
    "softshrink",
    "threshold",
    "clamp",
    "clamp_min",
    "clamp_max",
    "_prelu_kernel",
    // two tensors
    "atan2",
    "bitwise_and.Tensor",
    "bitwise_or.Tensor",
    "bitwise_xor.Tensor",
    "bitwise_left_shift.Tensor",
    "bitwise_right_shift.Tensor",
    "copysign.Tensor",
    "div.Tensor_mode",
    "eq.Tensor",
    "ne.Tensor",
    "lt.Tensor",
    "le.Tensor",
    "gt.Tensor",
    "ge.Tensor",
    "floor_divide",
    "fmax",
    "fmin",
    "fmod.Tensor",
    "gcd",
    "lcm",
    "heaviside",
    "hypot",
    "ldexp.Tensor",
    "logaddexp",
    "logaddexp2",
    "logical_and",
    "logical_or",
    "logical_xor",
    "maximum",
    "minimum",
    "nextafter",
    "pow.Tensor_Tensor",
    "remainder.Tensor",
    "rsub.Tensor",
    "special_xlog1py",
    "xlogy.Tensor",
    "__lshift__.Tensor",
    "__rshift__.Tensor",
    "igamma",
    "igammac",
    "special_zeta",
    "complex",
    "polar",
    "special_chebyshev_polynomial_t",
    "special_chebyshev_polynomial_u",
    "special_chebyshev_polynomial_v",
    "special_chebyshev_polynomial_w",
    "special_hermite_polynomial_h",
    "special_hermite_polynomial_he",
    "special_laguerre_polynomial_l",
    "special_legendre_polynomial_p",
    "special_shifted_chebyshev_polynomial_t",
    "special_shifted_chebyshev_polynomial_u",
    "special_shifted_chebyshev_polynomial_v",
    "special_shifted_chebyshev_polynomial_w",
    "clamp.Tensor",
    "clamp_min.Tensor",
    "clamp_max.Tensor",
    // a tensor and a number
    "bitwise_and.Scalar",
    "bitwise_or.Scalar",
    "bitwise_xor.Scalar",
    "copysign.Scalar",
    "div.Scalar_mode",
    "eq.Scalar",
    "ne.Scalar",
    "lt.Scalar",
    "le.Scalar",
    "gt.Scalar",
    "ge.Scalar",
    "floor_divide.Scalar",
    "fmod.Scalar",
    "pow.Tensor_Scalar",
    "remainder.Scalar",
    "remainder.Scalar_Tensor",
    "rsub.Scalar",
    "xlogy.Scalar_Other",
    "xlogy.Scalar_Self",
    "__lshift__.Scalar",
    "__rshift__.Scalar",
    "bitwise_and.Scalar_Tensor",
    "bitwise_or.Scalar_Tensor",
    "bitwise_xor.Scalar_Tensor",
    "bitwise_left_shift.Scalar_Tensor",
    "bitwise_left_shift.Tensor_Scalar",
    "bitwise_right_shift.Scalar_Tensor",
    "bitwise_right_shift.Tensor_Scalar",
    "special_xlog1py.other_scalar",
    "special_xlog1py.self_scalar",
    "special_zeta.other_scalar",
    "special_zeta.self_scalar",
    "special_chebyshev_polynomial_t.n_scalar",
    "special_chebyshev_polynomial_t.x_scalar",
    "special_chebyshev_polynomial_u.n_scalar",
    "special_chebyshev_polynomial_u.x_scalar",
    "special_chebyshev_polynomial_v.n_scalar",
    "special_chebyshev_polynomial_v.x_scalar",
    "special_chebyshev_polynomial_w.n_scalar",
    "special_chebyshev_polynomial_w.x_scalar",
    "special_hermite_polynomial_h.n_scalar",
    "special_hermite_polynomial_h.x_scalar",
    "special_hermite_polynomial_he.n_scalar",
    "special_hermite_polynomial_he.x_scalar",
    "special_laguerre_polynomial_l.n_scalar",
    "special_laguerre_polynomial_l.x_scalar",
    "special_legendre_polynomial_p.n_scalar",
    "special_legendre_polynomial_p.x_scalar",
    "special_shifted_chebyshev_polynomial_t.n_scalar",
    "special_shifted_chebyshev_polynomial_t.x_scalar",
    "special_shifted_chebyshev_polynomial_u.n_scalar",
    "special_shifted_chebyshev_polynomial_u.x_scalar",
    "special_shifted_chebyshev_polynomial_v.n_scalar",
    "special_shifted_chebyshev_polynomial_v.x_scalar",
    "special_shifted_chebyshev_polynomial_w.n_scalar",
    "special_shifted_chebyshev_polynomial_w.x_scalar",
    "masked_fill_.Scalar",
    // three tensors
    "addcdiv",
    "addcmul",
    "lerp.Tensor",
    "masked_fill_.Tensor",
    // Backward of the above: elementwise in the gradient and the saved tensors. It is a product of two tensors, so a
    // partial gradient is reduced first (see kScaledByOne).
    "elu_backward",
    "gelu_backward",
    "hardshrink_backward",
    "hardsigmoid_backward",
    "hardswish_backward",
    "hardtanh_backward",
    "leaky_relu_backward",
    "logit_backward",
    "sigmoid_backward",
    "silu_backward",
    "mish_backward",
    "softplus_backward",
    "softshrink_backward",
    "tanh_backward",
    "threshold_backward",
    "_prelu_kernel_backward",
    "native_dropout_backward",
    "log_sigmoid_backward",
    "rrelu_with_noise_backward",
};

// pow(2, x), masked_fill and others: unlike other elementwise ops, they give a contiguous result for all operands.
Rule contiguous_elementwise(const OpQuery& query) {
  Rule rule = elementwise(query);
  for (auto& out : rule.outs) out.strides.clear();
  return rule;
}

// out= forms. The last tensor is written. It must have the right sizes, because a local tensor cannot be resized alone.
Rule into_out(const OpQuery& query) {
  auto inputs = query;
  inputs.tensors.pop_back();
  const auto sizes = broadcast_sizes(inputs);
  const auto& out = query.tensors.back();
  TESSERA_CHECK(out.sizes == sizes, UsageError, query.schema.operator_name(), ": the result has sizes ", sizes,
                ", but `out` has ", out.sizes,
                "; pass an `out` of these sizes, or use the form that returns a new tensor");
  return elementwise(query);
}

}  // namespace

void register_pointwise(Registry& to) {
  Family family(to, "pointwise");
  for (const auto* op : kPointwiseShardOnlyOps)
    family.op_and_in_place(op, [](const OpQuery& query) { return elementwise(query); });
  for (const auto& row : kPointwisePartialOps)
    family.op_and_in_place(row.op, [&row](const OpQuery& query) { return elementwise(query, row.partials); });
  for (const auto* op : {"pow.Scalar", "masked_fill.Scalar", "masked_fill.Tensor", "log_sigmoid_forward",
                         "_standard_gamma_grad", "mvlgamma"})
    family.op(op, contiguous_elementwise);
  // Used by LibTorch's Adam with amsgrad.
  for (const auto* op : {"maximum.out", "minimum.out"}) family.op(op, into_out);
  family.op_and_in_place("mul.Tensor", [](const OpQuery& query) { return scaled(query, kProductWithOne); });
  family.op_and_in_place("div.Tensor", [](const OpQuery& query) { return scaled(query, kScaledByOne); });
}

}  // namespace tessera::rules
