#include "tessera/compile/detail/ir/dependencies.h"
#include "tessera/compile/detail/ir/op_table.h"
#include "tessera/compile/detail/passes/memory_by_order.h"
#include "tessera/compile/detail/passes/movable_with_collective.h"
#include "tessera/compile/detail/passes/passes.h"

#include <algorithm>
#include <numeric>

// Overlap of communication and computation under a memory bound. Posts collectives earlier and waits for them later.
//
//   a = all_gather(x)                          a = all_gather(x)
//   wait(a); use(a)                            b = all_gather(y)       posted before use(a)
//   b = all_gather(y)               ->         wait(a); use(a)
//   wait(b); use(b)                            wait(b); use(b)
//
// Law: any order that respects the dependence graph is valid. A collective in flight keeps its buffers alive longer, so
// each one moves only as far as peak memory stays within the setting `bytes`, or within the peak before this pass.
namespace tessera::compiler {
namespace {

class OverlapSchedule {
 public:
  OverlapSchedule(const Program& program, int64_t bound)
      : dependencies_(program), memory_(program), order_(program.nodes.size()), position_(program.nodes.size()) {
    std::iota(order_.begin(), order_.end(), 0);
    std::iota(position_.begin(), position_.end(), 0);
    before_ = memory_.peak(order_);
    bound_ = std::max(bound, before_);
  }

  const std::vector<int32_t>& order() const { return order_; }
  int64_t peak_before() const { return before_; }
  int64_t peak() const { return memory_.peak(order_); }

  // Moves nodes, given in order, together to right behind the last node that they depend on.
  bool move_up(const std::vector<int32_t>& together) {
    int32_t first = 0;
    for (const auto n : together)
      for (const auto earlier : dependencies_.before(static_cast<size_t>(n)))
        if (std::find(together.begin(), together.end(), earlier) == together.end())
          first = std::max(first, position(earlier) + 1);
    return move(together, first, position(together.front()));
  }
  // Moves a node to right before the first node that depends on it.
  bool move_down(int32_t node) {
    auto last = static_cast<int32_t>(order_.size());
    for (const auto later : dependencies_.after(static_cast<size_t>(node))) last = std::min(last, position(later));
    return move({node}, last, position(node) + 1);
  }

 private:
  int32_t position(int32_t node) const { return position_[static_cast<size_t>(node)]; }

  // Moves the nodes from position `here` to position `best`, or as near to it as the memory bound allows (bisection).
  bool move(const std::vector<int32_t>& together, int32_t best, int32_t here) {
    if (best == here || here < 0) return false;
    auto near = here, far = best;  // near is within the bound
    auto chosen = order_;
    for (auto at = far; at != near; at = near + (far - near) / 2) {
      auto tried = moved(together, at);
      if (memory_.peak(tried) <= bound_) {
        chosen = std::move(tried);
        near = at;
        if (at == best) break;
      } else {
        far = at;
      }
      if (std::abs(far - near) <= 1) break;
    }
    if (chosen == order_) return false;
    order_ = std::move(chosen);
    for (size_t i = 0; i < order_.size(); i++) position_[static_cast<size_t>(order_[i])] = static_cast<int32_t>(i);
    return true;
  }

  std::vector<int32_t> moved(const std::vector<int32_t>& together, int32_t before) const {
    std::vector<int32_t> order;
    order.reserve(order_.size());
    const auto is_moved = [&](int32_t n) { return std::find(together.begin(), together.end(), n) != together.end(); };
    for (int32_t i = 0; i <= static_cast<int32_t>(order_.size()); i++) {
      if (i == before) order.insert(order.end(), together.begin(), together.end());
      if (i < static_cast<int32_t>(order_.size()) && !is_moved(order_[static_cast<size_t>(i)]))
        order.push_back(order_[static_cast<size_t>(i)]);
    }
    return order;
  }

  Dependencies dependencies_;
  MemoryByOrder memory_;
  std::vector<int32_t> order_, position_;
  int64_t before_ = 0, bound_ = 0;
};

// A collective and the ops that only prepare its input.
std::vector<int32_t> with_inputs_of_collective(const Program& program, const Dependencies& dependencies,
                                               int32_t collective) {
  std::vector<int32_t> together{collective};
  for (size_t i = 0; i < together.size(); i++)
    for (const auto earlier : dependencies.before(static_cast<size_t>(together[i]))) {
      if (!can_move_with_collective(program, program.nodes[static_cast<size_t>(earlier)])) continue;
      const auto& users = dependencies.after(static_cast<size_t>(earlier));
      const bool only = std::all_of(users.begin(), users.end(), [&](int32_t user) {
        return kind_of(program.nodes[static_cast<size_t>(user)]) == OpKind::Wait ||
               std::find(together.begin(), together.end(), user) != together.end();
      });
      if (only && std::find(together.begin(), together.end(), earlier) == together.end()) together.push_back(earlier);
    }
  std::sort(together.begin(), together.end());
  return together;
}

}  // namespace

Matched overlap_communication(Program& program, const PassSettings& settings) {
  const Dependencies dependencies(program);
  OverlapSchedule schedule(program, settings.at("bytes"));
  Matched matched;
  const auto count = static_cast<int32_t>(program.nodes.size());
  for (int32_t n = count; n-- > 0;)
    if (kind_of(program.nodes[static_cast<size_t>(n)]) == OpKind::Wait) matched.times += schedule.move_down(n);
  for (int32_t n = 0; n < count; n++)
    if (kind_of(program.nodes[static_cast<size_t>(n)]) == OpKind::Collective)
      matched.times += schedule.move_up(with_inputs_of_collective(program, dependencies, n));
  matched.note = c10::str("peak ", schedule.peak(), " bytes, before ", schedule.peak_before());
  if (matched.times > 0) reorder(program, schedule.order());
  return matched;
}

}  // namespace tessera::compiler
