#include "tessera/compile/detail/passes/sharded_collectives.h"

#include "tessera/comm/detail/segment_ops.h"
#include "tessera/compile/detail/ir/op_table.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <functional>
#include <numeric>

namespace tessera::compiler {
namespace {

struct ShardedOp {
  const char* name;
  ShardedKind kind;
  bool of_segments;
};
constexpr ShardedOp kShardedOps[] = {
    {"tessera.all_gather", ShardedKind::AllGather, false},
    {"tessera.all_gather_into_segments_", ShardedKind::AllGather, true},
    {"tessera.reduce_scatter", ShardedKind::ReduceScatter, false},
    {"tessera.reduce_scatter_segments_into_", ShardedKind::ReduceScatter, true},
};

// Bytes of the unsharded side. The flat tensors of collectives of segments have the same size on all ranks.
int64_t unsharded_bytes(const Program& program, const Node& node, const ShardedOp& op) {
  const bool gathers = op.kind == ShardedKind::AllGather;
  if (op.of_segments) {
    const auto flat = std::get<ValueId>(node.args[gathers ? 1 : 0]);
    const auto ranks = program.groups[static_cast<size_t>(group_of(node))].ranks.size();
    return program[flat].type.bytes() * static_cast<int64_t>(ranks);
  }
  return program[std::get<ValueId>(gathers ? node.results[0] : node.args[0])].type.bytes();
}

// A subset of can_move_with_collective(): these ops are cheap to run early.
bool is_view_alloc_or_cast(const Program& program, const Node& node) {
  return is_view(program, node) || kind_of(node) == OpKind::Empty || node.name() == "aten._to_copy";
}

}  // namespace

std::optional<ShardedCollective> sharded_collective(const Program& program, size_t n) {
  const auto& node = program.nodes[n];
  if (kind_of(node) != OpKind::Collective) return {};
  const auto name = node.name();
  for (const auto& op : kShardedOps) {
    if (name != op.name) continue;
    ValueId any = kNone;  // all arguments have one dtype
    node.each_read([&](ValueId id) { any = id; });
    return ShardedCollective{
        n, op.kind, op.of_segments, group_of(node), program[any].type.dtype, unsharded_bytes(program, node, op)};
  }
  return {};
}

std::vector<ShardedCollective> sharded_collectives(const Program& program, ShardedKind kind) {
  std::vector<ShardedCollective> found;
  for (size_t n = 0; n < program.nodes.size(); n++)
    if (const auto each = sharded_collective(program, n); each && each->kind == kind) found.push_back(*each);
  return found;
}

bool can_share(const ShardedCollective& a, const ShardedCollective& b) {
  return a.kind == b.kind && a.of_segments == b.of_segments && a.group == b.group && a.dtype == b.dtype;
}

std::vector<size_t> nodes_of(const std::vector<ShardedCollective>& members) {
  std::vector<size_t> nodes;
  for (const auto& member : members) nodes.push_back(member.node);
  return nodes;
}

InputChain input_chain(const Program& program, const Dependencies& dependencies, size_t node, int32_t from) {
  InputChain chain;
  std::vector<char> seen(program.nodes.size(), 0);
  const std::function<void(size_t)> visit = [&](size_t n) {
    for (const auto earlier : dependencies.before(n)) {
      const auto e = static_cast<size_t>(earlier);
      if (std::exchange(seen[e], 1)) continue;
      if (earlier <= from || !is_view_alloc_or_cast(program, program.nodes[e])) {
        chain.after = std::max(chain.after, earlier);
        continue;
      }
      chain.nodes.push_back(earlier);
      visit(e);
    }
  };
  visit(node);
  std::sort(chain.nodes.begin(), chain.nodes.end());
  return chain;
}

JoinedSegments join_segments(const Program& program, const std::vector<ShardedCollective>& members) {
  // all_gather_into_segments_(tensors, flat, segments, label, group)
  // reduce_scatter_segments_into_(flat, tensors, segments, op, label, group)
  const bool gathers = members[0].kind == ShardedKind::AllGather;
  JoinedSegments joined;
  comm::Segments segments;
  std::vector<std::string> labels;
  for (const auto& member : members) {
    const auto& node = program.nodes[member.node];
    const auto& tensors = std::get<ValueList>(node.args[gathers ? 0 : 1]);
    const auto first = static_cast<int32_t>(joined.tensors.size());
    const auto own = comm::segments_from_ints(std::get<c10::IValue>(node.args[2]).toIntVector());
    segments.resize(std::max(segments.size(), own.size()));
    for (size_t r = 0; r < own.size(); r++)
      for (auto segment : own[r]) {
        if (segment.tensor != comm::kPaddingSegment) segment.tensor += first;
        segments[r].push_back(segment);
      }
    joined.tensors.insert(joined.tensors.end(), tensors.begin(), tensors.end());
    joined.flat.push_back(std::get<ValueId>(node.args[gathers ? 1 : 0]));
    joined.numel += program[joined.flat.back()].type.numel();
    labels.push_back(std::get<c10::IValue>(node.args[gathers ? 3 : 4]).toStringRef());
  }
  joined.segments = comm::segments_to_ints(segments);
  joined.label = c10::Join(", ", labels);
  return joined;
}

}  // namespace tessera::compiler
