#pragma once
#include "tessera/propagate/detail/decision.h"
#include "tessera/propagate/detail/op_entry.h"

#include <ATen/core/ivalue.h>

#include <memory>
#include <vector>

// Chooses a sharding strategy for each mesh axis of a call: strategies -> candidates with costs -> the cheapest. It
// reads only specs and arguments, and runs no collective. It must give the same decision on every rank, so the choice
// does not depend on the sizes of this rank's local tensors.
namespace tessera::propagate {

// One tensor argument of a call. Elements of a list count one by one.
struct CallTensor {
  const TensorSpec* spec;           // null for a plain tensor
  c10::IntArrayRef sizes, strides;  // global, or the plain tensor's own
  c10::ScalarType dtype;
  int arg, element;  // element: position in the list, or -1
};

struct Call {
  const OpEntry& entry;
  c10::ArrayRef<c10::IValue> args;
  std::vector<CallTensor> tensors;  // defined ones, in schema order
  detail::MeshState* mesh;
  bool in_backward;
};

// The candidates of every axis, for debug/explain.h.
struct Trace {
  struct Candidate {
    Placements in, out;  // on this axis: one per tensor, one per result
    double cost;         // microseconds; infinite: impossible
  };
  struct Axis {
    int element;  // of a list op with one decision per element; else -1
    int64_t axis;
    std::vector<Candidate> candidates;  // in the order of the rule's strategies
    int chosen = -1;
  };
  std::vector<Axis> axes;  // empty for a view, which has no strategies
};

// Chooses the strategies of a call. Throws ShardingError if none is possible: the op has no rule, or a written argument
// or the input of a view would need redistribution. `trace` has the candidates up to the error.
std::unique_ptr<Decision> choose_strategy(const Call& call, Trace* trace = nullptr);

// True if a tensor can be viewed with `sizes` without redistribution. Requires: a plain tensor of its strides can.
bool view_keeps_shards(const OpEntry& view, const TensorSpec& spec, c10::IntArrayRef sizes);

// aten::mm(f32[8, 10][S(0), R], f32[10, 4][R, R]) on mesh(dp=2,tp=2)
std::string describe(const Call& call);

}  // namespace tessera::propagate
