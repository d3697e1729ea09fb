#pragma once
#include "tessera/propagate/detail/decision.h"
#include "tessera/propagate/detail/op_entry.h"

#include <ATen/core/ivalue.h>

#include <memory>
#include <vector>

// rows -> candidates -> choice. Pure: sees specs and arguments, posts nothing, and must come to the same decision on
// every rank, so it never looks at the sizes of this rank's piece while it chooses.
namespace tessera::propagate {

// One tensor argument of a call, list elements one by one.
struct CallTensor {
  const TensorSpec* spec;           // null: plain
  c10::IntArrayRef sizes, strides;  // global, or the plain tensor's own
  c10::ScalarType dtype;
  int arg, element;  // element: place in the list, or -1
};

struct Call {
  const OpEntry& entry;
  c10::ArrayRef<c10::IValue> args;
  std::vector<CallTensor> tensors;  // defined ones, in schema order
  detail::MeshState* mesh;
  bool in_backward;
};

// How a decision came about, for those who ask (debug/explain.h): every candidate of every axis.
struct Trace {
  struct Candidate {
    Placements in, out;  // on this axis: one a tensor, one a result
    double cost;         // microseconds; infinite: it cannot be
  };
  struct Axis {
    int element;  // of a list op that decides element by element; else -1
    int64_t axis;
    std::vector<Candidate> candidates;  // in the order of the rule's rows
    int chosen = -1;
  };
  std::vector<Axis> axes;  // none for a view, which follows its input
};

// Throws ShardingError where no row fits: an op without rule, a written argument or a view that would have to be
// redistributed. `trace` is filled as far as it came.
std::unique_ptr<Decision> choose_strategy(const Call& call, Trace* trace = nullptr);

// Can a tensor be viewed in `sizes` without moving anything? Requires: a plain tensor of its strides could.
bool view_keeps_shards(const OpEntry& view, const TensorSpec& spec, c10::IntArrayRef sizes);

// aten::mm(f32[8, 10][S(0), R], f32[10, 4][R, R]) on mesh(dp=2,tp=2)
std::string describe(const Call& call);

}  // namespace tessera::propagate
