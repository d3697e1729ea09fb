#pragma once
#include "tessera/numerics/detail/sum_step.h"
#include "tessera/placement/detail/shard.h"

#include <cstdint>
#include <functional>
#include <vector>

// The order of every sum under Numerics::Invariant. It is a function of the number of terms alone. Pure functions.
//
//   sum of n terms  =  a fixed binary tree over leaves;  a leaf is a range of consecutive terms
//
// Leaves begin where a shard can begin: at each boundary of n terms in r equal shards, for r in kRankCounts. So a rank
// of a dim that is sharded over r ranks has complete leaves. If 24 divides n, there are 24 equal leaves. Shards of less
// than kShortestShard terms, and shards of unequal size of less than kLongSum terms, have no boundaries: leaves would
// be short, and every leaf costs an addition. A dim that is sharded so is gathered before its sum. A node of the tree
// is split at the leaf boundary that is nearest to its middle.
//
// No tree has one node per rank for 2 and for 3 ranks. A rank computes every maximal node that its terms cover (its
// complete subtrees). The ranks exchange those, and each rank adds the rest of the tree.
//
//   24 shards, 3 ranks:   rank 0: [0,6) [6,7) [7,8)    rank 1: [8,9) [9,12) [12,15) [15,16)    rank 2: [16,18) [18,24)
//
// Inside a leaf, terms are added in blocks: a range is halved until it has at most `block` terms, which are added in
// ascending order. `block` belongs to the op: it is part of the definition of its sum.
namespace tessera::numerics {

// The numbers of ranks over which a summed dim can be sharded.
inline constexpr int64_t kRankCounts[] = {1, 2, 3, 4, 6, 8, 12, 24};
inline constexpr int64_t kShortestShard = 64;    // terms
inline constexpr int64_t kLongSum = 24 * 64;     // terms; shards of a longer sum can have unequal sizes
inline constexpr int64_t kShortestOfShards = 1;  // of a tree whose terms are virtual shards

// Where leaves begin, and n at the end: ascending, without repetition. [0] for n = 0.
std::vector<int64_t> leaf_bounds(int64_t n, int64_t shortest = kShortestShard);

// The maximal nodes of the tree over n terms whose terms are all in `owned`, ascending. They cover `owned`.
// Throws ShardingError if `owned` does not begin or end at a leaf boundary.
std::vector<IndexRange> complete_subtrees(int64_t n, IndexRange owned, int64_t shortest = kShortestShard);

// The steps that compute complete_subtrees(n, owned). A rank that owns all n terms has one subtree, the sum. An empty
// `owned` has no steps.
std::vector<SumStep> sum_steps(int64_t n, IndexRange owned, int64_t block);
// The tree over n virtual shards, in which a step is a node, whose sum the caller computes: the largest nodes of at
// most `most` terms, divided further until there are `count` steps. part_steps(24, {0, 12}, 6) has the steps [0, 6) and
// [6, 12).
std::vector<SumStep> part_steps(int64_t n, IndexRange owned, int64_t most, size_t count = 0);

// Terms that are shards of a longer sum: the node `shards` of the tree over `count` shards, each with `terms` terms.
// The steps give the bits of the sums of the shards, one by one, added in the tree over the shards. Requires: `shards`
// is a node: a step of part_steps(count, ...).
std::vector<SumStep> nested_steps(int64_t count, IndexRange shards, int64_t terms, int64_t block);

// The largest number of values on the stack.
int stack_depth(const std::vector<SumStep>& steps);

// A step of the tree over the subtrees of all ranks: node = left + right. Slots 0 .. count-1 are the given subtrees in
// ascending order. Step i writes slot count + i. The last slot is the sum.
struct AddStep {
  int64_t left, right;
  bool operator==(const AddStep&) const = default;
};
// Requires: `subtrees` are nodes of the tree over n terms, disjoint, ascending, and cover all terms.
std::vector<AddStep> add_steps(int64_t n, const std::vector<IndexRange>& subtrees, int64_t shortest = kShortestShard);

}  // namespace tessera::numerics
