#define AT_PER_OPERATOR_HEADERS  // ExpandUtils.h would otherwise include every op
#include "tessera/rules/detail/build.h"

#include <ATen/ExpandUtils.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <numeric>

namespace tessera::rules {
namespace {

c10::OperatorName operator_name(const std::string& qualified) {
  auto dot = qualified.find('.');
  if (dot == std::string::npos) return {qualified, ""};
  return {qualified.substr(0, dot), qualified.substr(dot + 1)};
}

bool exists(const std::string& qualified) {
  return c10::Dispatcher::singleton().findSchema(operator_name(qualified)).has_value();
}

}  // namespace

void Family::op(std::string_view name, const RuleFn& fn, ListMode lists, bool reads_scalars) {
  auto qualified = "aten::" + std::string(name);
  if (exists(qualified)) to_.add(qualified, name_, fn, lists, reads_scalars);
}

void Family::op_and_in_place(std::string_view name, const RuleFn& fn) {
  op(name, fn);
  op(in_place_name(std::string(name)), fn);
}

std::string in_place_name(const std::string& name) {
  auto dot = std::min(name.find('.'), name.size());
  return name.substr(0, dot) + "_" + name.substr(dot);
}

int64_t fresh_outputs(const c10::FunctionSchema& schema) {
  int64_t count = 0;
  for (const auto& out : schema.returns()) count += !(out.alias_info() && out.alias_info()->isWrite());
  return count;
}

void add_uniform_strategy(Rule& rule, const OpQuery& query, Placement everywhere) {
  rule.add_strategy(Placements(query.tensors.size(), everywhere), Placements(rule.outs.size(), everywhere));
}

void add_replicated_strategy(Rule& rule, const OpQuery& query) { add_uniform_strategy(rule, query, R); }

StrategyBuilder::StrategyBuilder(Rule& rule, const OpQuery& query)
    : rule_(rule), query_(query), strategy_(rule.strategies.size()) {
  add_replicated_strategy(rule, query);
}

StrategyBuilder& StrategyBuilder::in(int arg, Placement p) {
  for (size_t i = 0; i < query_.tensors.size(); i++)
    if (query_.tensors[i].arg == arg) rule_.strategies[strategy_].in[i] = p;
  return *this;
}

StrategyBuilder& StrategyBuilder::out(size_t i, Placement p) {
  rule_.strategies[strategy_].out[i] = p;
  return *this;
}

StrategyBuilder& StrategyBuilder::special(bool one_range) {
  rule_.strategies[strategy_].special = true;
  rule_.strategies[strategy_].one_range = one_range;
  return *this;
}

void add_linear_strategies(Rule& rule, const OpQuery& query, int arg) {
  const auto dtype = query.tensor(arg).dtype;
  if (!c10::isFloatingType(dtype) && !c10::isComplexType(dtype)) return;
  for (auto p : kLinearPartials) StrategyBuilder(rule, query).in(arg, p).out(0, p);
}

Sizes broadcast_sizes(const OpQuery& query) {
  at::DimVector sizes;
  for (const auto& tensor : query.tensors) sizes = at::infer_size_dimvector(sizes, tensor.sizes);
  return Sizes(sizes.begin(), sizes.end());
}

Placement broadcast_shard(const TensorArg& operand, c10::IntArrayRef out_sizes, int64_t d) {
  int64_t own = d - static_cast<int64_t>(out_sizes.size()) + static_cast<int64_t>(operand.sizes.size());
  return own >= 0 && operand.sizes[own] == out_sizes[d] ? S(own) : R;
}

OutInfo contiguous_out(c10::IntArrayRef sizes) { return {Sizes(sizes), {}}; }

std::vector<int64_t> all_dims(const TensorArg& tensor) {
  std::vector<int64_t> dims(tensor.sizes.size());
  std::iota(dims.begin(), dims.end(), 0);
  return dims;
}

int64_t numel_of(c10::IntArrayRef sizes) {
  int64_t numel = 1;
  for (auto size : sizes) numel *= size;
  return numel;
}

void set_special_with_out_sizes(Rule& rule, const std::string& op) {
  rule.special = op;
  for (size_t i = 0; i < rule.outs.size(); i++)
    rule.special_fixes.push_back({.arg = -1, .what = ArgFix::What::OutSizes, .tensor = static_cast<int>(i)});
}

void drop_masked_outputs(Rule& rule, const c10::List<bool>& output_mask) {
  for (size_t i = 0; i < rule.outs.size(); i++) {
    if (output_mask[i]) continue;
    rule.outs[i] = {};
    for (auto& strategy : rule.strategies) strategy.out[i] = R;
  }
}

}  // namespace tessera::rules
