#include "tessera/compile/detail/ir/op_table.h"
#include "tessera/compile/detail/passes/passes.h"
#include "tessera/compile/detail/passes/sharded_collectives.h"

#include <algorithm>
#include <map>

namespace tessera::compiler {
namespace {

bool gathers(const Node& node) {
  const auto name = node.name();
  return name == "tessera.all_gather" || name == "tessera.all_gather_coalesced" ||
         name == "tessera.all_gather_into_runs_" || name == "tessera.all_gather_into_";
}

// The first wait for what the collective gives; its own place if there is none.
int32_t first_wait(const Program& program, size_t n) {
  std::vector<int32_t> pending;
  const auto note = [&](ValueId id) { pending.push_back(program.buffer_of(id)); };
  program.nodes[n].each_write(note);
  program.nodes[n].each_result(note);
  for (size_t w = n + 1; w < program.nodes.size(); w++) {
    if (kind_of(program.nodes[w]) != OpKind::Wait) continue;
    bool ours = false;
    program.nodes[w].each_read(
        [&](ValueId id) { ours |= std::find(pending.begin(), pending.end(), program.buffer_of(id)) != pending.end(); });
    if (ours) return static_cast<int32_t>(w);
  }
  return static_cast<int32_t>(n);
}

}  // namespace

// As the eager schedule does: once an all-gather has come, the next on its group is posted, and then computing begins.
//
//   gather 0  wait 0  compute 0  gather 1  wait 1  compute 1     ->
//   gather 0  wait 0  gather 1  compute 0  wait 1  compute 1
Matched prefetch_all_gathers(Program& program) {
  const Dependencies dependencies(program, Dependencies::Collectives::Any);
  std::vector<int32_t> order(program.nodes.size());
  for (size_t n = 0; n < order.size(); n++) order[n] = static_cast<int32_t>(n);
  const auto place_of = [&](int32_t n) { return std::find(order.begin(), order.end(), n) - order.begin(); };

  Matched matched;
  std::map<int32_t, int32_t> last_wait;  // by group: for the all-gather before
  for (size_t n = 0; n < program.nodes.size(); n++) {
    if (!gathers(program.nodes[n])) continue;
    const auto group = group_of(program.nodes[n]);
    const auto before = last_wait.find(group);
    if (before != last_wait.end()) {
      const auto feeding = feeding_of(program, dependencies, n, -1);
      auto at = place_of(before->second);
      if (feeding.after >= 0) at = std::max(at, place_of(feeding.after));
      std::vector<int32_t> moved;
      for (const auto fed : feeding.nodes)
        if (place_of(fed) > at) moved.push_back(fed);
      moved.push_back(static_cast<int32_t>(n));
      if (place_of(static_cast<int32_t>(n)) > at + static_cast<ptrdiff_t>(moved.size())) {
        for (const auto each : moved) order.erase(order.begin() + place_of(each));
        order.insert(order.begin() + at + 1, moved.begin(), moved.end());
        matched.times++;
      }
    }
    last_wait[group] = first_wait(program, n);
  }
  reorder(program, order, Dependencies::Collectives::Any);
  return matched;
}

}  // namespace tessera::compiler
