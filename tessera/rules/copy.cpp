#include "tessera/rules/detail/elementwise.h"
#include "tessera/rules/detail/families.h"
#include "tessera/rules/detail/geometry.h"

// Ops that copy a tensor or fill it with a value.
namespace tessera::rules {
namespace {

// A cast that rounds to an integer is not linear. All other casts are.
bool cast_is_linear(c10::ScalarType from, c10::ScalarType to) {
  if (to == c10::kBool) return from == c10::kBool;
  return !c10::isIntegralType(to, false) || c10::isIntegralType(from, false);
}

// The rule of an op with one tensor and one output of its sizes. It keeps every sharding and the given partials.
Rule keep(const OpQuery& query, Sizes strides, c10::ArrayRef<Placement> partials) {
  const auto& self = query.tensors[0];
  Rule rule;
  rule.outs = {{Sizes(self.sizes), std::move(strides)}};
  add_replicated_strategy(rule, query);
  for (size_t d = 0; d < self.sizes.size(); d++) add_uniform_strategy(rule, query, S(static_cast<int64_t>(d)));
  for (auto partial : partials) add_uniform_strategy(rule, query, partial);
  return rule;
}

Rule clone(const OpQuery& query) {
  const auto& self = query.tensors[0];
  return keep(query, like_strides(self.sizes, self.strides, memory_format_at(query, 1)), kAnyPartial);
}

Rule to_copy(const OpQuery& query) {
  const auto& self = query.tensors[0];
  auto dtype = query.is_none(1) ? self.dtype : static_cast<c10::ScalarType>(query.int_at(1));
  std::vector<Placement> through;
  if (cast_is_linear(self.dtype, dtype)) through = {Psum, Pmask};
  if (c10::isFloatingType(self.dtype) && c10::isFloatingType(dtype)) through.push_back(Pavg);
  return keep(query, like_strides(self.sizes, self.strides, memory_format_at(query, 6)), through);
}

// Like clone, without a memory format argument.
Rule plain_copy(const OpQuery& query) {
  const auto& self = query.tensors[0];
  return keep(query, like_strides(self.sizes, self.strides, std::nullopt), kAnyPartial);
}

Rule contiguous_copy(const OpQuery& query) { return keep(query, {}, kAnyPartial); }

// copy_(self, src). src is broadcast to self. Partial values are copied rank by rank.
Rule copy_into(const OpQuery& query) {
  std::vector<PartialStrategy> partials;
  bool linear = query.tensors.size() == 2 && cast_is_linear(query.tensors[1].dtype, query.tensors[0].dtype);
  if (linear)
    for (auto partial : kAnyPartial) partials.push_back({{partial, partial}, partial});
  Rule rule = elementwise(query, partials);
  if (!rule.outs.empty())
    rule.outs[0].strides = like_strides(query.tensors[0].sizes, query.tensors[0].strides, std::nullopt);
  return rule;
}

// Zero on every rank is zero after any reduction, so every partial is kept.
Rule zero(const OpQuery& query) {
  std::vector<PartialStrategy> partials;
  for (auto partial : kAnyPartial) partials.push_back({{partial}, partial});
  return elementwise(query, partials);
}

// Every rank has the same number. Its avg, max and min over ranks are that number; its sum is not.
Rule fill(const OpQuery& query) {
  const std::vector<PartialStrategy> partials = {{{Pavg}, Pavg},    {{Pmax}, Pmax},    {{Pmin}, Pmin},
                                                 {{Pavg, R}, Pavg}, {{Pmax, R}, Pmax}, {{Pmin, R}, Pmin}};
  return elementwise(query, partials);
}

}  // namespace

void register_copy(Registry& to) {
  Family family(to, "copy");
  family.op("clone", clone);
  family.op("_to_copy", to_copy);
  family.op("_conj_physical", plain_copy);
  family.op("lift", plain_copy);
  family.op("lift_fresh_copy", contiguous_copy);
  family.op("copy", copy_into);
  family.op("copy_", copy_into);
  family.op_and_in_place("zero", zero);
  family.op_and_in_place("fill.Scalar", fill);
  family.op_and_in_place("fill.Tensor", fill);
}

}  // namespace tessera::rules
