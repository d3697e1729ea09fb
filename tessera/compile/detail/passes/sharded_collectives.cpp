#include "tessera/compile/detail/passes/sharded_collectives.h"

#include "tessera/comm/detail/runs_ops.h"
#include "tessera/compile/detail/ir/op_table.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <functional>
#include <numeric>

namespace tessera::compiler {
namespace {

struct Form {
  const char* name;
  ShardedKind kind;
  bool of_runs;
};
constexpr Form kForms[] = {
    {"tessera.all_gather", ShardedKind::AllGather, false},
    {"tessera.all_gather_into_runs_", ShardedKind::AllGather, true},
    {"tessera.reduce_scatter", ShardedKind::ReduceScatter, false},
    {"tessera.reduce_scatter_runs_into_", ShardedKind::ReduceScatter, true},
};

// The side that is not cut, as bytes. Of runs all ranks have parts of one length.
int64_t bytes_when_whole(const Program& program, const Node& node, const Form& form) {
  const bool gathers = form.kind == ShardedKind::AllGather;
  if (form.of_runs) {
    const auto part = std::get<ValueId>(node.args[gathers ? 1 : 0]);
    const auto ranks = program.groups[static_cast<size_t>(group_of(node))].ranks.size();
    return program[part].type.bytes() * static_cast<int64_t>(ranks);
  }
  return program[std::get<ValueId>(gathers ? node.results[0] : node.args[0])].type.bytes();
}

bool is_on_the_way(const Program& program, const Node& node) {
  return is_view(program, node) || kind_of(node) == OpKind::Empty || node.name() == "aten._to_copy";
}

}  // namespace

std::optional<ShardedCollective> sharded_collective(const Program& program, size_t n) {
  const auto& node = program.nodes[n];
  if (kind_of(node) != OpKind::Collective) return {};
  const auto name = node.name();
  for (const auto& form : kForms) {
    if (name != form.name) continue;
    ValueId any = kNone;
    node.each_read([&](ValueId id) { any = id; });
    return ShardedCollective{
        n, form.kind, form.of_runs, group_of(node), program[any].type.dtype, bytes_when_whole(program, node, form)};
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
  return a.kind == b.kind && a.of_runs == b.of_runs && a.group == b.group && a.dtype == b.dtype;
}

CoalescedArguments coalesced_arguments(const Program& program, const std::vector<ShardedCollective>& members) {
  CoalescedArguments all;
  for (const auto& member : members) {
    const auto& node = program.nodes[member.node];
    all.xs.push_back(std::get<ValueId>(node.args[0]));
    all.results.push_back(std::get<ValueId>(node.results[0]));
    all.dims.push_back(std::get<c10::IValue>(node.args[1]).toInt());
    for (const auto size : std::get<c10::IValue>(node.args[2]).toIntVector()) all.sizes.push_back(size);
  }
  return all;
}

Feeding feeding_of(const Program& program, const Dependencies& dependencies, size_t node, int32_t from) {
  Feeding feeding;
  std::vector<char> seen(program.nodes.size(), 0);
  const std::function<void(size_t)> look = [&](size_t n) {
    for (const auto earlier : dependencies.before(n)) {
      const auto e = static_cast<size_t>(earlier);
      if (std::exchange(seen[e], 1)) continue;
      if (earlier <= from || !is_on_the_way(program, program.nodes[e])) {
        feeding.after = std::max(feeding.after, earlier);
        continue;
      }
      feeding.nodes.push_back(earlier);
      look(e);
    }
  };
  look(node);
  std::sort(feeding.nodes.begin(), feeding.nodes.end());
  return feeding;
}

c10::IValue joined_runs(const std::vector<std::vector<int64_t>>& runs, const std::vector<size_t>& tensors) {
  comm::Runs joined;
  int32_t first = 0;
  for (size_t i = 0; i < runs.size(); i++) {
    const auto own = comm::runs_from(runs[i]);
    joined.resize(std::max(joined.size(), own.size()));
    for (size_t r = 0; r < own.size(); r++)
      for (auto run : own[r]) {
        if (run.tensor != comm::kPadding) run.tensor += first;
        joined[r].push_back(run);
      }
    first += static_cast<int32_t>(tensors[i]);
  }
  return comm::numbers_of(joined);
}

std::string joined_labels(const std::vector<std::string>& labels) { return c10::Join(", ", labels); }

}  // namespace tessera::compiler
