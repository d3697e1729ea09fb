#pragma once
#include "tessera/placement/detail/shard.h"
#include "tessera/placement/placement.h"

#include <c10/util/ArrayRef.h>

#include <iosfwd>
#include <memory>
#include <string>
#include <vector>

// Plans how a tensor is redistributed from one list of placements to another. Planning uses only values, no ranks or
// tensors. execute.h runs the plan.
namespace tessera::redistribute {

enum class Move : uint8_t {
  Nothing,        // equal placements, or a new label for the same data (R -> P(avg))
  Slice,          // R -> S       each rank keeps its own shard
  Divide,         // R -> P(sum)  each rank keeps value / n
  AllGather,      // S -> R
  AllReduce,      // P -> R
  ReduceScatter,  // P -> S
  AllToAll,       // S(i) -> S(j)
};
const char* to_string(Move move);
bool communicates(Move move);

// One move on one mesh axis. An AllReduce can reduce over several axes at once.
struct PlanStep {
  Move move;
  c10::SmallVector<int64_t, 2> axes;
  Placement from, to;  // on those axes
  double bytes = 0;    // that each rank sends
  bool operator==(const PlanStep&) const = default;
};

// The input of the planner.
struct Problem {
  Sizes mesh_shape;
  Sizes sizes;  // global
  int64_t element_size;
  Placements from, to;
};

struct Plan {
  std::vector<PlanStep> steps;
  double cost = 0;  // microseconds by the model in cost.h
  bool communicates() const;
  bool only_relabels() const;  // the local tensor stays as it is
  int collectives() const;
};
std::string to_string(const Plan& plan, c10::ArrayRef<std::string> axis_names = {});  // "tp: all_gather S(0)->R 320 B"
std::ostream& operator<<(std::ostream& out, const Plan& plan);

// The cheapest sequence of moves. Identity costs nothing; the triangle inequality holds.
// Throws ShardingError if no sequence exists (S -> P; P of one kind to P of another).
Plan make_plan(const Problem& problem);
// As make_plan, but gives null if no plan exists.
std::unique_ptr<Plan> try_plan(const Problem& problem);

}  // namespace tessera::redistribute
