#pragma once
#include "tessera/rules/detail/rule.h"

#include <initializer_list>
#include <string>

// Words in which the files of rules are written.
namespace tessera::rules {

inline constexpr Placement R{};
inline constexpr Placement Psum{.kind = Placement::Kind::Partial, .op = ReduceOp::Sum};
inline constexpr Placement Pavg{.kind = Placement::Kind::Partial, .op = ReduceOp::Avg};
inline constexpr Placement Pproduct{.kind = Placement::Kind::Partial, .op = ReduceOp::Product};
inline constexpr Placement Pmax{.kind = Placement::Kind::Partial, .op = ReduceOp::Max};
inline constexpr Placement Pmin{.kind = Placement::Kind::Partial, .op = ReduceOp::Min};
inline constexpr Placement Pmask{.kind = Placement::Kind::MaskPartial};
inline constexpr Placement kLinearPartials[] = {Psum, Pavg};      // what f(a + b) = f(a) + f(b) keeps
inline constexpr Placement kZeroKeeping[] = {Psum, Pavg, Pmask};  // ... of one tensor, elementwise
inline constexpr Placement kAnyPartial[] = {Psum, Pavg, Pproduct, Pmax, Pmin, Pmask};  // but for norms: any p

inline Placement S(int64_t dim) { return {.kind = Placement::Kind::Shard, .dim = static_cast<int8_t>(dim)}; }

// Adds rules of one family to a registry, under names without "aten::".
class Family {
 public:
  Family(Registry& to, std::string name) : to_(to), name_(std::move(name)) {}

  // A name this LibTorch does not have is left out: overloads come and go between versions.
  void op(std::string_view name, const RuleFn& fn, ListMode lists = ListMode::Joint, bool reads_scalars = false);
  // add.Tensor and add_.Tensor
  void op_and_in_place(std::string_view name, const RuleFn& fn);

 private:
  Registry& to_;
  std::string name_;
};

// "add.Tensor" -> "add_.Tensor"
std::string in_place_name(const std::string& name);

// Tensors the op returns that are not arguments written in place; lists count as one.
int64_t fresh_outputs(const c10::FunctionSchema& schema);

// The rows "everything whole": R, R -> R.
void add_replicated_strategy(Rule& rule, const OpQuery& query);
// The same placement for all inputs and all outputs.
void add_uniform_strategy(Rule& rule, const OpQuery& query, Placement everywhere);

// A row under construction: R for all, then the exceptions.
//   StrategyBuilder(rule, query).in(0, S(1)).in(1, S(0)).out(0, Psum);
class StrategyBuilder {
 public:
  StrategyBuilder(Rule& rule, const OpQuery& query);
  // By argument of the schema; nothing happens if that argument is None. A list: all its elements.
  StrategyBuilder& in(int arg, Placement p);
  StrategyBuilder& out(size_t i, Placement p);
  StrategyBuilder& special(bool one_range = false);

 private:
  Rule& rule_;
  const OpQuery& query_;
  size_t strategy_;
};

// The sizes all tensors of the call broadcast to.
Sizes broadcast_sizes(const OpQuery& query);
// Where dim d of a broadcast result lies in an operand: S(its dim) if it has that size there, else R.
Placement broadcast_shard(const TensorArg& operand, c10::IntArrayRef out_sizes, int64_t d);

OutInfo contiguous_out(c10::IntArrayRef sizes);
int64_t numel_of(c10::IntArrayRef sizes);

}  // namespace tessera::rules
