#include "tessera/numerics/detail/sum_tree.h"

#include "tessera/base/error.h"

#include <algorithm>

namespace tessera::numerics {
namespace {

// A node of the tree: leaves [first, last).
struct LeafRange {
  size_t first, last;
};

// The leaf boundary nearest to the middle of the node; the lower one of two. Requires at least two leaves.
size_t split_of(const std::vector<int64_t>& bounds, LeafRange node) {
  const int64_t twice_middle = bounds[node.first] + bounds[node.last];
  size_t best = node.first + 1;
  for (size_t i = best; i < node.last; i++)
    if (std::abs(2 * bounds[i] - twice_middle) < std::abs(2 * bounds[best] - twice_middle)) best = i;
  return best;
}

void append_subtrees(const std::vector<int64_t>& bounds, LeafRange node, IndexRange owned,
                     std::vector<IndexRange>& subtrees) {
  const int64_t begin = bounds[node.first], end = bounds[node.last];
  if (end <= owned.begin || begin >= owned.end) return;
  if (owned.begin <= begin && end <= owned.end) {
    subtrees.push_back({begin, end});
    return;
  }
  const auto middle = split_of(bounds, node);
  append_subtrees(bounds, {node.first, middle}, owned, subtrees);
  append_subtrees(bounds, {middle, node.last}, owned, subtrees);
}

// Appends the steps of a range inside a leaf, or of a node, and leaves its sum on the stack.
void append_block_steps(int64_t begin, int64_t end, int64_t block, std::vector<SumStep>& steps) {
  if (end - begin <= block) {
    steps.push_back({begin, end});
    return;
  }
  const int64_t middle = begin + (end - begin) / 2;
  append_block_steps(begin, middle, block, steps);
  append_block_steps(middle, end, block, steps);
  steps.back().merges++;
}

void append_node_steps(const std::vector<int64_t>& bounds, LeafRange node, int64_t block, std::vector<SumStep>& steps) {
  if (node.last - node.first == 1) return append_block_steps(bounds[node.first], bounds[node.last], block, steps);
  const auto middle = split_of(bounds, node);
  append_node_steps(bounds, {node.first, middle}, block, steps);
  append_node_steps(bounds, {middle, node.last}, block, steps);
  steps.back().merges++;
}

size_t index_of_bound(const std::vector<int64_t>& bounds, int64_t position) {
  return static_cast<size_t>(std::lower_bound(bounds.begin(), bounds.end(), position) - bounds.begin());
}

// Where a node is split. Requires at least two terms.
int64_t middle_of(const std::vector<int64_t>& bounds, IndexRange node) {
  const LeafRange leaves{index_of_bound(bounds, node.begin), index_of_bound(bounds, node.end)};
  if (leaves.last - leaves.first > 1) return bounds[split_of(bounds, leaves)];
  return node.begin + (node.end - node.begin) / 2;  // inside a leaf
}

// The steps of a node that is divided down to nodes for which stops(node) is true.
template <class Stops>
void append_divided(const std::vector<int64_t>& bounds, IndexRange node, const Stops& stops,
                    std::vector<SumStep>& steps) {
  if (stops(node)) {
    steps.push_back({node.begin, node.end});
    return;
  }
  const auto middle = middle_of(bounds, node);
  append_divided(bounds, {node.begin, middle}, stops, steps);
  append_divided(bounds, {middle, node.end}, stops, steps);
  steps.back().merges++;
}

// The slot of the node: a given subtree, or the sum of two slots.
int64_t add_node(const std::vector<int64_t>& bounds, LeafRange node, const std::vector<IndexRange>& subtrees,
                 std::vector<AddStep>& steps) {
  const IndexRange range{bounds[node.first], bounds[node.last]};
  const auto found = std::find(subtrees.begin(), subtrees.end(), range);
  if (found != subtrees.end()) return found - subtrees.begin();
  TESSERA_CHECK(node.last - node.first > 1, InternalError, "no subtree has the terms [", range.begin, ", ", range.end,
                ")");
  const auto middle = split_of(bounds, node);
  const auto left = add_node(bounds, {node.first, middle}, subtrees, steps);
  const auto right = add_node(bounds, {middle, node.last}, subtrees, steps);
  steps.push_back({left, right});
  return static_cast<int64_t>(subtrees.size() + steps.size()) - 1;
}

}  // namespace

std::vector<int64_t> leaf_bounds(int64_t n, int64_t shortest) {
  std::vector<int64_t> bounds = {0, n};
  for (const auto ranks : kRankCounts) {
    const int64_t shard = (n + ranks - 1) / ranks;
    if (shard < shortest || (n % ranks != 0 && n < kLongSum)) continue;
    for (int64_t r = 1; r < ranks; r++) bounds.push_back(std::min(n, r * shard));
  }
  std::sort(bounds.begin(), bounds.end());
  bounds.erase(std::unique(bounds.begin(), bounds.end()), bounds.end());
  return bounds;
}

std::vector<IndexRange> complete_subtrees(int64_t n, IndexRange owned, int64_t shortest) {
  std::vector<IndexRange> subtrees;
  if (owned.begin == owned.end) return subtrees;
  const auto bounds = leaf_bounds(n, shortest);
  for (const auto end : {owned.begin, owned.end})
    TESSERA_CHECK(std::binary_search(bounds.begin(), bounds.end(), end), ShardingError,
                  "Numerics::Invariant: a sum of ", n, " terms is sharded into [", owned.begin, ", ", owned.end,
                  ") on this rank, which is not one of 2, 3, 4, 6, 8, 12 or 24 equal shards of at least ", shortest,
                  " terms; redistribute the dim to Replicate");
  append_subtrees(bounds, {0, bounds.size() - 1}, owned, subtrees);
  return subtrees;
}

namespace {

// The steps of each subtree, which append(subtree) adds to `steps`; indices count from the begin of `owned`.
template <class Append>
void append_subtrees(const std::vector<IndexRange>& subtrees, IndexRange owned, std::vector<SumStep>& steps,
                     const Append& append) {
  int number = 0;
  for (const auto& subtree : subtrees) {
    append(subtree);
    steps.back().subtree = number++;
  }
  for (auto& step : steps) {
    step.begin -= owned.begin;
    step.end -= owned.begin;
  }
}

}  // namespace

std::vector<SumStep> sum_steps(int64_t n, IndexRange owned, int64_t block) {
  std::vector<SumStep> steps;
  const auto bounds = leaf_bounds(n);
  append_subtrees(complete_subtrees(n, owned), owned, steps, [&](IndexRange subtree) {
    append_node_steps(bounds, {index_of_bound(bounds, subtree.begin), index_of_bound(bounds, subtree.end)}, block,
                      steps);
  });
  return steps;
}

std::vector<SumStep> part_steps(int64_t n, IndexRange owned, int64_t most, size_t count) {
  const auto bounds = leaf_bounds(n, kShortestOfShards);
  const auto length = [](IndexRange range) { return range.end - range.begin; };
  const auto subtrees = complete_subtrees(n, owned, kShortestOfShards);
  auto parts = subtrees;
  for (;;) {
    const auto longest = std::max_element(parts.begin(), parts.end(),
                                          [&](const auto& l, const auto& r) { return length(l) < length(r); });
    if (longest == parts.end() || length(*longest) == 1) break;
    if (length(*longest) <= most && parts.size() >= count) break;
    const auto middle = middle_of(bounds, *longest);
    const IndexRange right{middle, longest->end};
    longest->end = middle;
    parts.insert(longest + 1, right);
  }
  std::vector<SumStep> steps;
  const auto is_part = [&](IndexRange node) { return std::find(parts.begin(), parts.end(), node) != parts.end(); };
  append_subtrees(subtrees, owned, steps, [&](IndexRange subtree) { append_divided(bounds, subtree, is_part, steps); });
  return steps;
}

std::vector<SumStep> nested_steps(int64_t count, IndexRange shards, int64_t terms, int64_t block) {
  const auto of_shard = sum_steps(terms, {0, terms}, block);
  std::vector<SumStep> steps, outer_steps;
  append_divided(
      leaf_bounds(count, kShortestOfShards), shards, [](IndexRange node) { return node.end - node.begin == 1; },
      outer_steps);
  for (const auto& outer : outer_steps) {
    for (auto step : of_shard) {
      step.begin += (outer.begin - shards.begin) * terms;
      step.end += (outer.begin - shards.begin) * terms;
      step.subtree = -1;
      steps.push_back(step);
    }
    steps.back().merges += outer.merges;
  }
  steps.back().subtree = 0;
  return steps;
}

int stack_depth(const std::vector<SumStep>& steps) {
  int depth = 0, most = 0;
  for (const auto& step : steps) {
    depth += (step.subtree < 0 ? 1 : 0) - step.merges;
    most = std::max(most, depth);
  }
  return most;
}

std::vector<AddStep> add_steps(int64_t n, const std::vector<IndexRange>& subtrees, int64_t shortest) {
  const auto bounds = leaf_bounds(n, shortest);
  std::vector<AddStep> steps;
  add_node(bounds, {0, bounds.size() - 1}, subtrees, steps);
  return steps;
}

}  // namespace tessera::numerics
