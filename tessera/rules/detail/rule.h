#pragma once
#include "tessera/placement/placement.h"
#include "tessera/placement/detail/shard.h"

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
#include <unordered_map>
#include <vector>

// What is known about an op: facts over ONE mesh axis, as rows. No tensors, no communication, no mesh here.
//
//   mm "mk,kn->mn"         R,    R    -> R
//                          S(0), R    -> S(0)
//                          S(1), S(0) -> P(sum)
//                          R,    S(1) -> S(1)
//
// A row is a fact of mathematics: if the inputs lie like this over n ranks and every rank runs the op on its pieces,
// the results are pieces of the right answer lying like that. It holds for every n, uneven and empty pieces included;
// the oracle (testing/rule_oracle.h) tries each by brute force. S(d) in a row stands for any way of cutting dim d; dims
// cut together in one row are cut alike, so they must have equal size. propagate/ chooses a row for each mesh axis on
// its own.
namespace tessera::rules {

// A tensor argument, or an element of a list of them, as the op sees it: global geometry.
struct TensorArg {
  c10::IntArrayRef sizes, strides;
  c10::ScalarType dtype;
  int arg;           // index into the schema's arguments
  int element;       // place in the list, or -1
  bool distributed;  // false: a plain tensor of one element, the same on every rank; its entry in a row must be R
};

// One call of an op: its tensors, and its other arguments by value.
struct OpQuery {
  const c10::FunctionSchema& schema;
  c10::ArrayRef<c10::IValue> args;  // as called; tensors in it must not be looked at
  std::vector<TensorArg> tensors;   // defined ones only, in schema order
  bool in_backward = false;

  const TensorArg& tensor(int arg, int element = -1) const;       // throws InternalError if absent
  const TensorArg* find_tensor(int arg, int element = -1) const;  // null if absent or undefined
  int index_of(int arg, int element = -1) const;                  // its place in `tensors`, or -1
  // Static arguments.
  int64_t int_at(int arg) const;
  int64_t dim_at(int arg, int64_t ndim) const;  // made non-negative
  bool bool_at(int arg) const;
  double double_at(int arg) const;  // of a float or a Scalar
  bool is_none(int arg) const;
  std::vector<int64_t> ints_at(int arg) const;  // [] if None
};

// One row. `in` has an entry for each of query.tensors, `out` one for each returned tensor (list elements counted one
// by one); outputs that are arguments written in place are not listed. An output that this call leaves undefined
// (output_mask) is listed as R, with sizes [].
struct Strategy {
  Placements in, out;
  // IndexRange `Rule::special` instead of the op where some axis uses this row (a masked lookup, say).
  bool special = false;
  // Only for cuts in one run per rank (S(d), S(d,b)): the special op needs an offset.
  bool one_range = false;
};

// A static argument that depends on the piece: rewritten before the op runs on the locals.
struct ArgFix {
  enum class What : uint8_t {
    OutSizes,    // local sizes of output `tensor`
    OutStrides,  // strides of a dense local of those sizes, dims in the global order
    InSizes,     // local sizes of input `tensor` (index into query.tensors)
    InSize,      // ... of its dim `dim` alone
    InOffset,    // global index at which this rank's piece of that dim begins (one_range rows only)
  };
  int arg;
  What what;
  int tensor = 0;
  int dim = 0;
};

struct OutInfo {
  Sizes sizes, strides;  // global; strides empty: contiguous
};

// The answer to a query.
struct Rule {
  std::vector<Strategy> strategies;  // the first among equally cheap ones wins
  std::vector<OutInfo> outs;
  std::vector<ArgFix> fixes;
  // Another op to run on the locals: "tessera::masked_embedding". Its arguments are the op's own, then one for each of
  // special_args (constants) and then special_fixes (values of this rank). It is right for every row of the rule, also
  // those that do not ask for it, so it may run as soon as one axis asks. A rule with `follow` always runs it.
  std::string special;
  std::vector<c10::IValue> special_args;
  std::vector<ArgFix> special_fixes;
  std::vector<int> not_written;  // arguments the schema calls written that this call leaves alone (grads of fused Adam)
  double flops = 0;              // multiply-adds of the whole op; 0: one per output element

  // An op to call on the distributed tensors themselves, with the same arguments, instead of choosing a row: the mean
  // of a loss whose denominator lies in the data needs a step between two sums. Rows and outs are then empty.
  std::string decompose;

  // Views do not choose: the placements of the input say what the output's are, all axes together. Given them, returns
  // the output's, or none for an axis that cannot be kept (it is then gathered; outside backward that is an error).
  // Asking again with those axes R gives the same answer for the others. Several outputs (split) all lie alike.
  using Follow = std::function<std::vector<std::optional<Placement>>(PlacementsRef in, c10::IntArrayRef mesh_shape)>;
  Follow follow;

  void add_strategy(Placements in, Placements out) { strategies.push_back({std::move(in), std::move(out)}); }
};

// Called on a cache miss only. Throws ShardingError or UsageError on arguments no plain tensor would accept either.
using RuleFn = std::function<Rule(const OpQuery&)>;

enum class ListMode : uint8_t {
  Joint,  // one decision for all tensors (cat, stack, index)
  // foreach and fused: element i of every list is decided alone, following element i of the first list. A query then
  // has element i of each list and the lone tensors; a row has one output for each list returned.
  Elementwise,
};

struct OpRule {
  RuleFn fn;
  ListMode lists = ListMode::Joint;
  std::string family;  // "pointwise", "matmul", ...: the file it comes from
  // The rows depend on the value of a Scalar or a float (the p of a norm): a cache must key it by value.
  bool reads_scalars = false;
};

class Registry {
 public:
  // "aten::add.Tensor", or a user's own "ns::op". Registering a name again replaces it.
  // Rows that ask a plain tensor for anything but R are dropped from each answer; malformed ones throw InternalError.
  void add(std::string_view op, std::string_view family, RuleFn fn, ListMode lists = ListMode::Joint,
           bool reads_scalars = false);
  void same_as(std::string_view op, std::string_view like);                      // the other op's rule under this name
  const OpRule* find(std::string_view op) const;                                 // null: no rule
  std::vector<std::string> names() const;                                        // sorted
  uint64_t version() const { return version_.load(std::memory_order_acquire); }  // grows with each change; caches look

 private:
  void put(std::string_view op, OpRule rule);
  mutable std::mutex mutex_;  // thread ranks register and look up at once
  std::unordered_map<std::string, std::unique_ptr<const OpRule>> rules_;
  std::vector<std::unique_ptr<const OpRule>> replaced_;  // kept: a rank may be running one
  std::atomic<uint64_t> version_ = 0;
};

Registry& registry();             // the process's, filled by register_all at first use
void register_all(Registry& to);  // rules/all_rules.cpp: the table of contents

}  // namespace tessera::rules
