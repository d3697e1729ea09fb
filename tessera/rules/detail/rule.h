#pragma once
#include "tessera/placement/detail/shard.h"
#include "tessera/placement/placement.h"

#include <ATen/core/function_schema.h>
#include <ATen/core/ivalue.h>
#include <c10/core/ScalarType.h>

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <unordered_map>
#include <vector>

// The sharding rule of an op: its sharding strategies over ONE mesh axis (PyTorch: OpStrategy). A rule uses no tensors,
// no communication and no mesh.
//
//   mm "mk,kn->mn"         R,    R    -> R
//                          S(0), R    -> S(0)
//                          S(1), S(0) -> P(sum)
//                          R,    S(1) -> S(1)
//
// A strategy is a fact about the op. If the inputs have the placements on the left and every rank runs the op on its
// local tensors, then the local results have the placements on the right. It holds for every number of ranks, and for
// uneven and empty shards. The oracle (testing/rule_oracle.h) tests each strategy by brute force.
// S(d) in a strategy stands for every way to shard dim d: S(d), S(d,b), SS(d,k). All dims that one strategy shards are
// sharded in the same way, so they must have equal sizes. propagate/ chooses one strategy for each mesh axis.
namespace tessera::rules {

// Sizes or strides of a tensor argument. A rule runs before ATen has checked the arguments, so operator[] throws
// UsageError for a dim that the tensor does not have.
class DimsRef : public c10::IntArrayRef {
 public:
  DimsRef() = default;
  template <class Dims>
  requires std::is_constructible_v<c10::IntArrayRef, const Dims&> DimsRef(const Dims& dims)
      : ArrayRef(dims) {}  // NOLINT(google-explicit-constructor)
  const int64_t& operator[](size_t dim) const {
    if (dim >= size()) fail(dim);
    return ArrayRef::operator[](dim);
  }

 private:
  [[noreturn]] void fail(size_t dim) const;
};

// A tensor argument, or an element of a tensor list argument, with its global sizes and strides.
struct TensorArg {
  DimsRef sizes, strides;
  c10::ScalarType dtype;
  int arg;           // index into the schema's arguments
  int element;       // position in the list, or -1
  bool distributed;  // false: a plain tensor of one element, equal on all ranks; strategies must give it R
};

// Geometry of an output.
struct OutInfo {
  Sizes sizes, strides;  // global; strides empty: contiguous
};

// One call of an op: its tensors, and its other arguments by value.
struct OpQuery {
  const c10::FunctionSchema& schema;
  c10::ArrayRef<c10::IValue> args;  // as called; a rule must not read the tensors in it
  std::vector<TensorArg> tensors;   // defined ones only, in schema order
  bool in_backward = false;
  // Global sizes and strides of the new outputs, from a call of the op on meta tensors. None if LibTorch cannot do it.
  std::optional<std::vector<OutInfo>> dense_outs = std::nullopt;

  const TensorArg& tensor(int arg, int element = -1) const;       // throws UsageError if absent
  const TensorArg* find_tensor(int arg, int element = -1) const;  // null if absent or undefined
  int index_of(int arg, int element = -1) const;                  // its index in `tensors`, or -1
  // Values of the arguments that are not tensors.
  int64_t int_at(int arg) const;
  int64_t dim_at(int arg, int64_t ndim) const;  // made non-negative
  bool bool_at(int arg) const;
  double double_at(int arg) const;  // of a float or a Scalar
  bool is_none(int arg) const;
  std::vector<int64_t> ints_at(int arg) const;  // [] if None
};

// A sharding strategy over one mesh axis. `in` has an entry for each of query.tensors. `out` has an entry for each
// returned tensor; elements of a list count one by one. Outputs that are arguments written in place are not listed. An
// output that this call leaves undefined (output_mask) is listed as R, with sizes [].
struct Strategy {
  Placements in, out;
  // If an axis uses this strategy, `Rule::special` runs instead of the op (for example a masked embedding lookup).
  bool special = false;
  // Only for S(d) and S(d,b), where each rank has one index range: the special op needs its offset.
  bool one_range = false;
};

// An argument that depends on the local shard, for example a size. It is replaced by the local value before the op
// runs.
struct ArgFix {
  enum class What : uint8_t {
    OutSizes,    // local sizes of output `tensor`
    OutStrides,  // strides of a dense local tensor of those sizes, dims in the global memory order
    InSizes,     // local sizes of input `tensor` (index into query.tensors)
    InSize,      // ... of its dim `dim` alone
    InOffset,    // global index where this rank's shard of that dim begins (one_range strategies only)
  };
  int arg;
  What what;
  int tensor = 0;
  int dim = 0;
};

// What a rule function returns for a query.
struct Rule {
  std::vector<Strategy> strategies;  // of equally cheap ones the first is chosen
  std::vector<OutInfo> outs;
  std::vector<ArgFix> fixes;
  // Another op that runs on the local tensors: "tessera::masked_embedding". Its arguments are the op's arguments, then
  // special_args (constants), then special_fixes (values of this rank). It is correct for every strategy of the rule,
  // so it runs if the strategy of at least one axis has special = true. A rule with `follow` always runs it.
  std::string special;
  std::vector<c10::IValue> special_args;
  std::vector<ArgFix> special_fixes;
  // Arguments that the schema marks as written but the call does not write (grads of fused Adam).
  std::vector<int> not_written;
  double flops = 0;  // multiply-adds of the global op; 0: one per output element

  // An op that is called on the distributed tensors with the same arguments, instead of a strategy. Example: the mean
  // of a loss whose denominator depends on the data needs two sums. The op's own name: its composite kernel.
  // `strategies` and `outs` are then empty.
  std::string decompose;

  // The only strategy is all-Replicate, and the sizes of the results come from the local results (PyTorch: a
  // replicate-only strategy). For ops whose output sizes depend on the data, and for those that need all elements.
  bool gathered = false;

  // For views, which have no strategies. Computes the output placements from the input placements of all axes together.
  // The result has std::nullopt for an axis whose sharding the view cannot keep. That axis is gathered in backward;
  // otherwise the call throws. A second call with those axes R gives the same result for the others. All outputs
  // (split) have the same placements.
  using Follow = std::function<std::vector<std::optional<Placement>>(PlacementsRef in, c10::IntArrayRef mesh_shape)>;
  Follow follow;

  void add_strategy(Placements in, Placements out) { strategies.push_back({std::move(in), std::move(out)}); }
};

// Called only on a cache miss. Throws ShardingError, or UsageError for arguments that the op also rejects for plain
// tensors.
using RuleFn = std::function<Rule(const OpQuery&)>;

enum class ListMode : uint8_t {
  Joint,  // one decision for all tensors (cat, stack, index)
  // foreach and fused ops: one decision for each i, for element i of all lists. A query then has element i of each list
  // and the tensors that are not in a list. A strategy has one output for each returned list.
  Elementwise,
};

struct OpRule {
  RuleFn fn;
  ListMode lists = ListMode::Joint;
  std::string family;  // "pointwise", "matmul", ...: the file it comes from
  // The strategies depend on the value of a Scalar or a float (the p of a norm). The cache key then has its value.
  bool reads_scalars = false;
};

class Registry {
 public:
  // `op` is "aten::add.Tensor", or a custom op "ns::op". A second registration replaces the first.
  // Strategies that do not give R to a plain tensor are dropped. Strategies of wrong length throw InternalError.
  void add(std::string_view op, std::string_view family, RuleFn fn, ListMode lists = ListMode::Joint,
           bool reads_scalars = false);
  // Registers the rule of `like` for `op`.
  void same_as(std::string_view op, std::string_view like);
  const OpRule* find(std::string_view op) const;  // null: no rule
  std::vector<std::string> names() const;         // sorted
  // Grows with each change, so that caches can clear themselves.
  uint64_t version() const { return version_.load(std::memory_order_acquire); }

 private:
  void put(std::string_view op, OpRule rule);
  mutable std::mutex mutex_;  // thread ranks register and look up concurrently
  std::unordered_map<std::string, std::unique_ptr<const OpRule>> rules_;
  std::vector<std::unique_ptr<const OpRule>> replaced_;  // kept, because a rank may use one
  std::atomic<uint64_t> version_ = 0;
};

Registry& registry();             // of this process; register_all() fills it on first use
void register_all(Registry& to);  // in rules/all_rules.cpp: the list of all rule files

}  // namespace tessera::rules
