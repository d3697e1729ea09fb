#pragma once
#include "tessera/rules/detail/rule.h"

#include <initializer_list>
#include <string>

// Helpers to write sharding rules.
namespace tessera::rules {

inline constexpr Placement R{};
inline constexpr Placement Psum{.kind = Placement::Kind::Partial, .op = ReduceOp::Sum};
inline constexpr Placement Pavg{.kind = Placement::Kind::Partial, .op = ReduceOp::Avg};
inline constexpr Placement Pproduct{.kind = Placement::Kind::Partial, .op = ReduceOp::Product};
inline constexpr Placement Pmax{.kind = Placement::Kind::Partial, .op = ReduceOp::Max};
inline constexpr Placement Pmin{.kind = Placement::Kind::Partial, .op = ReduceOp::Min};
inline constexpr Placement Pmask{.kind = Placement::Kind::MaskPartial};
inline constexpr Placement kLinearPartials[] = {Psum, Pavg};  // kept by linear ops: f(a + b) = f(a) + f(b)
// Kept by linear elementwise ops of one tensor, which map zero to zero.
inline constexpr Placement kZeroKeeping[] = {Psum, Pavg, Pmask};
// Every partial but norms, which have any p.
inline constexpr Placement kAnyPartial[] = {Psum, Pavg, Pproduct, Pmax, Pmin, Pmask};

inline Placement S(int64_t dim) { return {.kind = Placement::Kind::Shard, .dim = static_cast<int8_t>(dim)}; }

// Registers the rules of one family. Names are written without "aten::".
class Family {
 public:
  Family(Registry& to, std::string name) : to_(to), name_(std::move(name)) {}

  // Skips an op that this version of LibTorch does not have.
  void op(std::string_view name, const RuleFn& fn, ListMode lists = ListMode::Joint, bool reads_scalars = false);
  // The op and its in-place form: add.Tensor and add_.Tensor.
  void op_and_in_place(std::string_view name, const RuleFn& fn);

 private:
  Registry& to_;
  std::string name_;
};

// "add.Tensor" -> "add_.Tensor"
std::string in_place_name(const std::string& name);

// Number of returned tensors that are not arguments written in place. A list counts as one.
int64_t fresh_outputs(const c10::FunctionSchema& schema);

// Adds the strategy in which everything is replicated: R, R -> R.
void add_replicated_strategy(Rule& rule, const OpQuery& query);
// Adds the strategy with one placement for all inputs and outputs.
void add_uniform_strategy(Rule& rule, const OpQuery& query, Placement everywhere);

// Adds a strategy to a rule: R for every tensor, then the exceptions.
//   StrategyBuilder(rule, query).in(0, S(1)).in(1, S(0)).out(0, Psum);
class StrategyBuilder {
 public:
  StrategyBuilder(Rule& rule, const OpQuery& query);
  // Sets the placement of an argument of the schema, or of all elements of a list. Does nothing for None.
  StrategyBuilder& in(int arg, Placement p);
  StrategyBuilder& out(size_t i, Placement p);
  StrategyBuilder& special(bool one_range = false);

 private:
  Rule& rule_;
  const OpQuery& query_;
  size_t strategy_;  // index in rule_.strategies
};

// Adds the strategies of an op that is linear in argument `arg` of the schema: if it is partial, so is output 0, and
// all other tensors are replicated. Only for floating point and complex numbers: integers are rounded.
void add_linear_strategies(Rule& rule, const OpQuery& query, int arg);

// The sizes to which all tensors of the call broadcast.
Sizes broadcast_sizes(const OpQuery& query);
// The placement of an operand when dim d of the broadcast result is sharded: S(its dim) if its size is equal, else R.
Placement broadcast_shard(const TensorArg& operand, c10::IntArrayRef out_sizes, int64_t d);

OutInfo contiguous_out(c10::IntArrayRef sizes);
std::vector<int64_t> all_dims(const TensorArg& tensor);  // 0, 1, ..., ndim - 1
int64_t numel_of(c10::IntArrayRef sizes);

// Sets the special op and gives it the local sizes of all outputs as its last arguments.
void set_special_with_out_sizes(Rule& rule, const std::string& op);

// Marks the outputs whose entry of output_mask is false as undefined.
void drop_masked_outputs(Rule& rule, const c10::List<bool>& output_mask);

}  // namespace tessera::rules
