#include "tessera/rules/detail/elementwise.h"
#include "tessera/rules/detail/families.h"
#include "tessera/rules/detail/geometry.h"

#include <algorithm>

// Ops that read only the sizes and the dtype of a tensor. The random ones are in random.cpp.
namespace tessera::rules {

Rule like_factory(const OpQuery& query, Sizes strides) {
  const auto& self = query.tensors[0];
  Rule rule;
  rule.outs = {{Sizes(self.sizes), std::move(strides)}};
  add_replicated_strategy(rule, query);
  for (int64_t d = 0; d < static_cast<int64_t>(self.sizes.size()); d++)
    StrategyBuilder(rule, query).in(self.arg, S(d)).out(0, S(d));
  for (auto partial : kAnyPartial) StrategyBuilder(rule, query).in(self.arg, partial);
  return rule;
}

Rule like_factory(const OpQuery& query) {
  auto format = memory_format_at(query, static_cast<int>(query.schema.arguments().size()) - 1);
  return like_factory(query, like_strides(query.tensors[0].sizes, query.tensors[0].strides, format));
}

namespace {

// new_zeros(self, size). The result has the placements of self if the sizes are equal; otherwise it is replicated.
Rule of_new_size(const OpQuery& query, std::optional<Sizes> strides) {
  auto asked = query.ints_at(1);
  const auto& self = query.tensors[0];
  bool same = self.sizes == c10::IntArrayRef(asked);
  Rule rule;
  if (same) {
    rule = like_factory(query, {});
  } else {
    rule.outs = {contiguous_out(asked)};
    add_replicated_strategy(rule, query);
    for (int64_t d = 0; d < static_cast<int64_t>(self.sizes.size()); d++) StrategyBuilder(rule, query).in(0, S(d));
    for (auto partial : kAnyPartial) StrategyBuilder(rule, query).in(0, partial);
  }
  rule.outs[0].strides = strides.value_or(Sizes{});
  rule.fixes = {{.arg = 1, .what = ArgFix::What::OutSizes}};
  return rule;
}

Rule new_of_size(const OpQuery& query) { return of_new_size(query, std::nullopt); }

Rule new_strided(const OpQuery& query) {
  auto strides = query.ints_at(2);
  Rule rule = of_new_size(query, Sizes(strides.begin(), strides.end()));
  rule.fixes.push_back({.arg = 2, .what = ArgFix::What::OutStrides});
  return rule;
}

}  // namespace

void register_factories(Registry& to) {
  Family family(to, "factories");
  for (const auto* op : {"zeros_like", "ones_like", "full_like", "empty_like"})
    family.op(op, [](const OpQuery& query) { return like_factory(query); });
  for (const auto* op : {"new_zeros", "new_ones", "new_full", "new_empty"}) family.op(op, new_of_size);
  family.op("new_empty_strided", new_strided);
}

}  // namespace tessera::rules
