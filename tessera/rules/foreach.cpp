#include "tessera/rules/detail/build.h"
#include "tessera/rules/detail/elementwise.h"
#include "tessera/rules/detail/families.h"
#include "tessera/rules/detail/geometry.h"

#include <cmath>

// Ops on lists of tensors, with one decision for each i. A query here has element i of every list, and the tensors that
// are not in a list.
namespace tessera::rules {
namespace {

// An elementwise op over element i of each list, with broadcasting (a step counter with its parameter). A tensor that
// is not in a list is replicated: it has one value for all elements, or one value for each element of the list.
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
// Ops that keep every partial of one tensor.
const std::vector<PartialStrategy> kEveryPartial = {{{Psum}, Psum}, {{Pavg}, Pavg}, {{Pproduct}, Pproduct},
                                                    {{Pmax}, Pmax}, {{Pmin}, Pmin}, {{Pmask}, Pmask}};
const std::vector<PartialStrategy> kCopy = {
    {{Psum, Psum}, Psum}, {{Pavg, Pavg}, Pavg}, {{Pmax, Pmax}, Pmax}, {{Pmin, Pmin}, Pmin}};

// Ops that keep partials. Each also has an in-place form.
const struct ForeachPartialOp {
  const char* op;
  const std::vector<PartialStrategy>& partials;
} kForeachPartialOps[] = {
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
    {"_foreach_zero", kEveryPartial},
    {"_foreach_clone", kEveryPartial},
    {"_foreach_copy", kCopy},
};

// Ops that keep no partial: a partial input is reduced first. Each also has an in-place form.
const char* const kForeachShardOnlyOps[] = {
    "add.Tensor",  // adds one number to all elements; as kShifted, but alpha can scale it
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

// One optimizer step of one parameter. Parameter, gradient and states have the same sharding; learning rate and scale
// are replicated. A partial gradient is reduced first, because the square of a sum is not the sum of squares.
const char* const kFusedOptimizerOps[] = {
    "_fused_adam_", "_fused_adam_.tensor_lr", "_fused_adamw_",   "_fused_adamw_.tensor_lr",
    "_fused_sgd_",  "_fused_sgd_.tensor_lr",  "_fused_adagrad_", "_fused_adagrad_.tensor_lr",
};

// The schemas mark gradients as written. They are written (times 1 / grad_scale) only if grad_scale is given.
Rule fused(const OpQuery& query) {
  auto rule = over_lists(query);
  const auto scale = query.schema.argumentIndexWithName("grad_scale");
  if (!scale || query.is_none(*scale)) rule.not_written = {1};
  return rule;
}

// _foreach_norm(self, ord, dtype) gives one number for each tensor.
Rule foreach_norm(const OpQuery& query) {
  const auto& self = query.tensors[0];
  double p = query.double_at(1);
  Rule rule;
  rule.outs = {contiguous_out({})};
  rule.flops = static_cast<double>(numel_of(self.sizes));
  add_replicated_strategy(rule, query);
  // The infinity norm throws for a local tensor without elements. p = 0 counts nonzeros, so the counts are summed.
  bool composes = p >= 0 && std::isfinite(p);
  for (int64_t d = 0; d < static_cast<int64_t>(self.sizes.size()) && composes; d++)
    rule.add_strategy({S(d)}, {p == 0 ? Psum : NormPartial(p)});
  return rule;
}

// _foreach_powsum(self, ord, dtype): the sum of |x|^ord of each tensor.
Rule foreach_powsum(const OpQuery& query) {
  const auto& self = query.tensors[0];
  Rule rule;
  rule.outs = {contiguous_out({})};
  rule.flops = static_cast<double>(numel_of(self.sizes));
  add_replicated_strategy(rule, query);
  for (int64_t d = 0; d < static_cast<int64_t>(self.sizes.size()); d++) rule.add_strategy({S(d)}, {Psum});
  return rule;
}

// _amp_foreach_non_finite_check_and_unscale_(self, found_inf, inv_scale). A rank without an infinity does not change
// found_inf, so the result over all ranks is the max. If self is sharded, found_inf must be P(max).
Rule unscale(const OpQuery& query) {
  const auto& self = query.tensors[0];
  Rule rule;
  add_replicated_strategy(rule, query);
  StrategyBuilder(rule, query).in(1, Pmax);
  for (int64_t d = 0; d < static_cast<int64_t>(self.sizes.size()); d++)
    StrategyBuilder(rule, query).in(0, S(d)).in(1, Pmax);
  return rule;
}

}  // namespace

void register_foreach(Registry& to) {
  Family family(to, "foreach");
  auto add = [&](const std::string& op, const RuleFn& fn) {
    family.op(op, fn, ListMode::Elementwise);
    family.op(in_place_name(op), fn, ListMode::Elementwise);
  };
  for (const auto* op : kForeachShardOnlyOps)
    add(std::string("_foreach_") + op, [](const OpQuery& q) { return over_lists(q); });
  for (const auto& row : kForeachPartialOps)
    add(row.op, [&row](const OpQuery& q) { return over_lists(q, row.partials); });
  for (const auto* op : kFusedOptimizerOps) family.op(op, fused, ListMode::Elementwise);
  family.op("_foreach_norm.Scalar", foreach_norm, ListMode::Elementwise, /*reads_scalars=*/true);
  family.op("_foreach_powsum.Scalar", foreach_powsum, ListMode::Elementwise);
  family.op("_amp_foreach_non_finite_check_and_unscale_", unscale, ListMode::Elementwise);
}

}  // namespace tessera::rules
