#include "tessera/rules/detail/build.h"
#include "tessera/rules/detail/elementwise.h"
#include "tessera/rules/detail/families.h"
#include "tessera/rules/detail/geometry.h"

#include <cmath>

// Lists of tensors, element i of each on its own. A query here has element i of every list, and the lone tensors.
namespace tessera::rules {
namespace {

// Elementwise over the list elements, which broadcast (a step counter against its parameter). A lone tensor is whole:
// it may be one number for all, or one for each element of the list.
Rule over_lists(const OpQuery& query, c10::ArrayRef<PartialStrategy> partials = {}) {
  OpQuery elements{query.schema, query.args, {}, query.in_backward};
  for (const auto& tensor : query.tensors)
    if (tensor.element >= 0) elements.tensors.push_back(tensor);
  Rule rule = elementwise(elements, partials);
  for (auto& strategy : rule.strategies) {
    Placements all;
    size_t next = 0;
    for (const auto& tensor : query.tensors) all.push_back(tensor.element >= 0 ? strategy.in[next++] : R);
    strategy.in = std::move(all);
  }
  return rule;
}

const std::vector<PartialStrategy> kOneLinear = {{{Psum}, Psum}, {{Pavg}, Pavg}, {{Pmask}, Pmask}};
const std::vector<PartialStrategy> kTwoSummed = {{{Psum, Psum}, Psum}, {{Pavg, Pavg}, Pavg}, {{Pmask, Pmask}, Psum}};
const std::vector<PartialStrategy> kShifted = {{{Pavg}, Pavg}, {{Pmax}, Pmax}, {{Pmin}, Pmin}};
const std::vector<PartialStrategy> kNothing = {};
const std::vector<PartialStrategy> kZero = {{{Psum}, Psum}, {{Pavg}, Pavg}, {{Pproduct}, Pproduct},
                                       {{Pmax}, Pmax}, {{Pmin}, Pmin}, {{Pmask}, Pmask}};
const std::vector<PartialStrategy> kCopy = {
    {{Psum, Psum}, Psum}, {{Pavg, Pavg}, Pavg}, {{Pmax, Pmax}, Pmax}, {{Pmin, Pmin}, Pmin}};

// Each also in place.
const struct {
  const char* op;
  const std::vector<PartialStrategy>& partials;
} kThrough[] = {
    {"_foreach_add.List", kTwoSummed},
    {"_foreach_sub.List", kTwoSummed},
    {"_foreach_add.Scalar", kShifted},
    {"_foreach_sub.Scalar", kShifted},
    {"_foreach_add.ScalarList", kShifted},
    {"_foreach_sub.ScalarList", kShifted},
    {"_foreach_mul.Scalar", kOneLinear},
    {"_foreach_mul.ScalarList", kOneLinear},
    {"_foreach_mul.Tensor", kOneLinear},
    {"_foreach_div.Scalar", kOneLinear},
    {"_foreach_div.ScalarList", kOneLinear},
    {"_foreach_div.Tensor", kOneLinear},
    {"_foreach_neg", kOneLinear},
    {"_foreach_lerp.Scalar", kTwoSummed},
    {"_foreach_lerp.ScalarList", kTwoSummed},
    {"_foreach_zero", kZero},
    {"_foreach_clone", kZero},
    {"_foreach_copy", kCopy},
    {"_foreach_add.Tensor", kNothing},  // adds one number to all: as kShifted, but alpha may scale it
};

const char* const kWhole[] = {
    "abs",
    "acos",
    "asin",
    "atan",
    "ceil",
    "cos",
    "cosh",
    "erf",
    "erfc",
    "exp",
    "expm1",
    "floor",
    "frac",
    "lgamma",
    "log",
    "log10",
    "log1p",
    "log2",
    "reciprocal",
    "round",
    "rsqrt",
    "sigmoid",
    "sign",
    "sin",
    "sinh",
    "sqrt",
    "tan",
    "tanh",
    "trunc",
    "mul.List",
    "div.List",
    "maximum.List",
    "minimum.List",
    "clamp_max.List",
    "clamp_min.List",
    "pow.List",
    "lerp.List",
    "maximum.Scalar",
    "minimum.Scalar",
    "clamp_max.Scalar",
    "clamp_min.Scalar",
    "pow.Scalar",
    "maximum.ScalarList",
    "minimum.ScalarList",
    "clamp_max.ScalarList",
    "clamp_min.ScalarList",
    "pow.ScalarList",
    "addcmul.Scalar",
    "addcmul.ScalarList",
    "addcmul.Tensor",
    "addcdiv.Scalar",
    "addcdiv.ScalarList",
    "addcdiv.Tensor",
    "pow.ScalarAndTensor",
};

// One optimizer step of one parameter: parameter, gradient, states cut alike; learning rate and scale whole. A Partial
// gradient is reduced first: the square of a sum is not the sum of squares.
const char* const kFused[] = {
    "_fused_adam_", "_fused_adam_.tensor_lr", "_fused_adamw_",   "_fused_adamw_.tensor_lr",
    "_fused_sgd_",  "_fused_sgd_.tensor_lr",  "_fused_adagrad_", "_fused_adagrad_.tensor_lr",
};

// The schemas say that gradients are written; they are, by 1 / grad_scale, only where one is given.
Rule fused(const OpQuery& query) {
  auto rule = over_lists(query);
  const auto scale = query.schema.argumentIndexWithName("grad_scale");
  if (!scale || query.is_none(*scale)) rule.not_written = {1};
  return rule;
}

// _foreach_norm(self, ord, dtype): one number for each tensor.
Rule norm(const OpQuery& query) {
  const auto& self = query.tensors[0];
  double p = query.double_at(1);
  Rule rule;
  rule.outs = {contiguous_out({})};
  rule.flops = static_cast<double>(numel_of(self.sizes));
  add_replicated_strategy(rule, query);
  // An infinite norm of a piece without elements throws; p = 0 counts, so its terms add.
  bool composes = p >= 0 && std::isfinite(p);
  for (int64_t d = 0; d < static_cast<int64_t>(self.sizes.size()) && composes; d++)
    rule.add_strategy({S(d)}, {p == 0 ? Psum : NormPartial(p)});
  return rule;
}

// _amp_foreach_non_finite_check_and_unscale_(self, found_inf, inv_scale): a rank that sees no infinity leaves
// found_inf, so what all ranks have found is the largest. Where self is cut, found_inf must be P(max).
Rule unscale(const OpQuery& query) {
  const auto& self = query.tensors[0];
  Rule rule;
  add_replicated_strategy(rule, query);
  StrategyBuilder(rule, query).in(1, Pmax);
  for (int64_t d = 0; d < static_cast<int64_t>(self.sizes.size()); d++) StrategyBuilder(rule, query).in(0, S(d)).in(1, Pmax);
  return rule;
}

}  // namespace

void register_foreach(Registry& to) {
  Family family(to, "foreach");
  auto add = [&](const std::string& op, const RuleFn& fn) {
    family.op(op, fn, ListMode::Elementwise);
    family.op(in_place_name(op), fn, ListMode::Elementwise);
  };
  for (const auto* op : kWhole) add(std::string("_foreach_") + op, [](const OpQuery& q) { return over_lists(q); });
  for (const auto& row : kThrough) add(row.op, [&row](const OpQuery& q) { return over_lists(q, row.partials); });
  for (const auto* op : kFused) family.op(op, fused, ListMode::Elementwise);
  family.op("_foreach_norm.Scalar", norm, ListMode::Elementwise, /*reads_scalars=*/true);
  family.op("_amp_foreach_non_finite_check_and_unscale_", unscale, ListMode::Elementwise);
}

}  // namespace tessera::rules
