#pragma once
#include "tessera/placement/placement.h"
#include "tessera/placement/detail/shard.h"

#include <c10/util/ArrayRef.h>

#include <iosfwd>
#include <memory>
#include <string>
#include <vector>

// How a tensor gets from one set of placements to another: found here without any rank, executed in execute.h.
namespace tessera::redistribute {

enum class Move : uint8_t {
  Nothing,        // equal placements, or a relabelling that moves nothing (P(avg) <- R)
  Slice,          // R -> S       keep the own piece
  Divide,         // R -> P(sum)  each rank keeps value / n
  AllGather,      // S -> R
  AllReduce,      // P -> R
  ReduceScatter,  // P -> S
  AllToAll,       // S(i) -> S(j)
};
const char* to_string(Move move);
bool communicates(Move move);

// One move on one mesh axis, or, for reductions of one kind to R, on several at once.
struct Step {
  Move move;
  c10::SmallVector<int64_t, 2> axes;
  Placement from, to;  // on those axes
  double bytes = 0;    // on the wire, sent per rank
  bool operator==(const Step&) const = default;
};

// What a plan is made for: pure values.
struct Problem {
  Sizes mesh_shape;
  Sizes sizes;  // global
  int64_t element_size;
  Placements from, to;
};

struct Plan {
  std::vector<Step> steps;
  double cost = 0;  // microseconds by the model in cost.h
  bool communicates() const;
  int collectives() const;
};
std::string to_string(const Plan& plan, c10::ArrayRef<std::string> axis_names = {});  // "tp: all_gather S(0)->R 320 B"
std::ostream& operator<<(std::ostream& out, const Plan& plan);

// The cheapest sequence of moves. Identity costs nothing; the triangle inequality holds.
// Throws ShardingError where there is none (S -> P; P of one kind to P of another).
Plan make_plan(const Problem& problem);
// As above without throwing: null where there is none.
std::unique_ptr<Plan> try_plan(const Problem& problem);

}  // namespace tessera::redistribute
