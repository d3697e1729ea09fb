#include "tessera/compile/detail/ir/collective.h"
#include "tessera/compile/detail/ir/op_table.h"
#include "tessera/compile/detail/passes/passes.h"
#include "tessera/compile/detail/passes/sharded_collectives.h"

#include <algorithm>
#include <map>

// Prefetch: posts each all-gather right after the wait for the previous one on its group, before the computation that
// uses the previous result. FSDP's eager schedule does the same.
//
//   gather 0  wait 0  compute 0  gather 1  wait 1  compute 1     ->
//   gather 0  wait 0  gather 1  compute 0  wait 1  compute 1
//
// Law: an all-gather may be posted earlier if its input is ready there. The order of all-gathers on a group stays; the
// new order depends only on the program, so it is equal on all ranks.
namespace tessera::compiler {
namespace {

bool is_all_gather_op(const Node& node) {
  const auto name = node.name();
  return name == "tessera.all_gather" || name == "tessera.all_gather_coalesced" ||
         name == "tessera.all_gather_into_segments_" || name == "tessera.all_gather_into_";
}

}  // namespace

Matched prefetch_all_gathers(Program& program) {
  const Dependencies dependencies(program, Dependencies::Collectives::Any);
  std::vector<int32_t> order(program.nodes.size());
  for (size_t n = 0; n < order.size(); n++) order[n] = static_cast<int32_t>(n);
  const auto position_of = [&](int32_t n) { return std::find(order.begin(), order.end(), n) - order.begin(); };

  Matched matched;
  std::map<int32_t, int32_t> last_wait;  // by group: the wait for the previous all-gather
  for (size_t n = 0; n < program.nodes.size(); n++) {
    if (!is_all_gather_op(program.nodes[n])) continue;
    const auto group = group_of(program.nodes[n]);
    const auto before = last_wait.find(group);
    if (before != last_wait.end()) {
      const auto chain = input_chain(program, dependencies, n, -1);
      auto at = position_of(before->second);
      if (chain.after >= 0) at = std::max(at, position_of(chain.after));
      std::vector<int32_t> moved;
      for (const auto needed : chain.nodes)
        if (position_of(needed) > at) moved.push_back(needed);
      moved.push_back(static_cast<int32_t>(n));
      if (position_of(static_cast<int32_t>(n)) > at + static_cast<ptrdiff_t>(moved.size())) {
        for (const auto each : moved) order.erase(order.begin() + position_of(each));
        order.insert(order.begin() + at + 1, moved.begin(), moved.end());
        matched.times++;
      }
    }
    const auto wait = wait_of(program, n);
    last_wait[group] = static_cast<int32_t>(wait < program.nodes.size() ? wait : n);
  }
  reorder(program, order, Dependencies::Collectives::Any);
  return matched;
}

}  // namespace tessera::compiler
