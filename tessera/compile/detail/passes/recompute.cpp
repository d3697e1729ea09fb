#include "tessera/compile/detail/ir/def_use.h"
#include "tessera/compile/detail/ir/op_table.h"
#include "tessera/compile/detail/passes/op_variants.h"
#include "tessera/compile/detail/passes/passes.h"
#include "tessera/compile/detail/report/memory_curve.h"

#include <algorithm>
#include <limits>
#include <map>
#include <numeric>
#include <set>

// Recomputes cheap values for backward instead of keeping them over the peak of memory: results of pointwise ops and of
// layer norm, if their operands are kept anyway.
//
//   %2: f32[8] = aten.gelu(%1, "none")              %2: f32[8] = aten.gelu(%1, "none")
//   %3: f32[8, 8] = aten.outer(%2, %0)              %3: f32[8, 8] = aten.outer(%2, %0)
//   ...                                       ->    ...
//                                                   %9: f32[8] = aten.gelu(%1, "none")
//   %4: f32[8] = aten.mv(%3, %2)                    %4: f32[8] = aten.mv(%3, %9)
//   %5: f32[8] = aten.gelu_backward(%4, %1, "none") %5: f32[8] = aten.gelu_backward(%4, %1, "none")
//
// recompute_products does the same for a few matrix products, because their results are the largest values: those of
// the least work per byte, together at most some percent of the work of all products. A layer norm before the product
// is computed again with it.
//
// Law: a pure op gives the same values again if nothing has written its operands in between.
namespace tessera::compiler {
namespace {

constexpr int64_t kSmallestBytes = 65536;  // smaller buffers are not worth a call

bool is_cheap(const Node& node) {
  const auto& name = node.op.operator_name().name;
  return (name == "aten::native_layer_norm" || is_pointwise(node.op)) && is_pure(node);
}

// Multiplications of a matrix product on the CPU; 0 for other nodes.
double work_of(const Program& program, const Node& node) {
  const auto& name = node.op.operator_name().name;
  if (name != "aten::mm" && name != "aten::addmm") return 0;
  const auto* a = std::get_if<ValueId>(&node.args[name == "aten::addmm"]);
  const auto* out = std::get_if<ValueId>(&node.results[0]);
  if (!a || !out || *a == kNone || *out == kNone || !program[*out].type.device.is_cpu()) return 0;
  return static_cast<double>(program[*out].type.numel()) * static_cast<double>(program[*a].type.sizes[1]);
}

class Recompute {
 public:
  explicit Recompute(Program& program) : program_(program) { find_peak(); }

  int64_t peak_bytes() const { return peak_bytes_; }

  // Returns the number of ops that are added. If the peak would not be lower, none.
  int64_t run() {
    copies_.clear(), recomputed_.clear();
    for (int32_t n = 0; n < peak_; n++)
      if (is_cheap(program_.nodes[static_cast<size_t>(n)])) consider(static_cast<size_t>(n));
    return rewrite_if_lower() ? static_cast<int64_t>(copies_.size()) : 0;
  }

  // Recomputes results of products of together at most this much work, half of what that allows. Returns their
  // work; 0 if none lowers the peak.
  double run_products(double most_work, int64_t& times) {
    struct Candidate {
      size_t node;
      double work, bytes;
    };
    std::vector<Candidate> candidates;
    for (int32_t n = 0; n < peak_; n++) {
      const auto node = static_cast<size_t>(n);
      const auto work = work_of(program_, program_.nodes[node]);
      if (work == 0 || work > most_work) continue;
      copies_.clear(), recomputed_.clear();
      consider(node);
      if (!copies_.empty())
        candidates.push_back({node, work, static_cast<double>(bytes_[static_cast<size_t>(*recomputed_.begin())])});
    }
    std::stable_sort(candidates.begin(), candidates.end(), [](const Candidate& a, const Candidate& c) {
      const auto x = a.work / a.bytes, y = c.work / c.bytes;
      return x != y ? x < y : a.bytes > c.bytes;  // equal: the first one, whose result would be kept longest
    });
    const auto lowers_peak = [&] {
      const auto count = static_cast<int64_t>(copies_.size());
      const bool lower = rewrite_if_lower();
      if (lower) times += count;
      return lower;
    };
    const auto recompute_some = [&](size_t from, size_t count) {
      copies_.clear(), recomputed_.clear();
      double work = 0;
      for (auto i = from; i < candidates.size() && copies_.size() < count; i++) {
        if (work + candidates[i].work > most_work) continue;
        const auto before = copies_.size();
        consider(candidates[i].node);
        if (copies_.size() > before) work += candidates[i].work;
      }
      return work;
    };
    recompute_some(0, candidates.size());
    for (auto count = copies_.size() / 2; count > 1; count /= 2)
      if (const auto work = recompute_some(0, count); lowers_peak()) return work;
    for (size_t i = 0; i < candidates.size(); i++)
      if (const auto work = recompute_some(i, 1); lowers_peak()) return work;
    return 0;
  }

 private:
  struct Copy {
    size_t node;
    size_t at;                      // the first use after the peak: the op runs again before this node
    std::vector<size_t> producers;  // cheap nodes that compute operands for this copy alone
  };

  void find_peak() {
    read_program();
    curve_ = memory_curve(program_, nullptr).own;
    const auto peak = std::max_element(curve_.begin(), curve_.end());
    peak_ = static_cast<int32_t>(peak - curve_.begin());
    peak_bytes_ = curve_.empty() ? 0 : *peak;
  }

  // The peak after rewrite(). A recomputed buffer is free between its last use before the second run and that run. The
  // second runs and their producers need memory between two nodes.
  int64_t predicted_peak() const {
    const auto nodes = curve_.size();
    std::vector<int64_t> at_node(nodes + 1, 0),
        before_node(nodes + 1, 0);  // bytes less, as changes from one to the next
    for (const auto& copy : copies_)
      each_recomputed(copy, [&](size_t b) {
        const auto& uses = uses_with_views_[b];
        const auto last = *(std::lower_bound(uses.begin(), uses.end(), static_cast<int32_t>(copy.at)) - 1);
        const auto free = static_cast<size_t>(last) + 1;
        at_node[free] += bytes_[b], at_node[copy.at] -= bytes_[b];
        before_node[free] += bytes_[b], before_node[copy.at + 1] -= bytes_[b];
      });
    std::partial_sum(at_node.begin(), at_node.end(), at_node.begin());
    std::partial_sum(before_node.begin(), before_node.end(), before_node.begin());
    int64_t peak = 0;
    for (size_t n = 0; n < nodes; n++) peak = std::max(peak, curve_[n] - at_node[n]);
    std::map<size_t, int64_t> now;  // before a node: with the results of the second runs so far
    for (const auto& copy : copies_) {
      auto& bytes = now.try_emplace(copy.at, curve_[copy.at] - new_at_[copy.at] - before_node[copy.at]).first->second;
      auto while_it_runs = bytes + result_bytes(copy.node);
      for (const auto producer : copy.producers) while_it_runs += result_bytes(producer);
      peak = std::max(peak, while_it_runs);
      each_recomputed(copy, [&](size_t b) { bytes += bytes_[b]; });
    }
    return peak;
  }
  template <class F>
  void each_recomputed(const Copy& copy, const F& f) const {
    program_.nodes[copy.node].each_result([&](ValueId id) {
      if (recomputed_.count(program_.buffer_of(id))) f(static_cast<size_t>(program_.buffer_of(id)));
    });
  }
  int64_t result_bytes(size_t node) const {
    int64_t bytes = 0;
    program_.nodes[node].each_result([&](ValueId id) { bytes += bytes_[static_cast<size_t>(program_.buffer_of(id))]; });
    return bytes;
  }

  bool rewrite_if_lower() {
    if (copies_.empty() || predicted_peak() >= peak_bytes_) return false;
    rewrite();
    return true;
  }

  // Where each buffer is used and written, by nodes that run.
  void read_program() {
    uses_.assign(static_cast<size_t>(program_.buffers), {});
    uses_with_views_ = writes_ = uses_;
    for (size_t n = 0; n < program_.nodes.size(); n++) {
      const auto& node = program_.nodes[n];
      const bool runs = !is_view(program_, node);
      const auto note = [&](auto& list, ValueId id) {
        auto& at = list[static_cast<size_t>(program_.buffer_of(id))];
        if (at.empty() || at.back() != static_cast<int32_t>(n)) at.push_back(static_cast<int32_t>(n));
      };
      const auto use = [&](ValueId id) {
        note(uses_with_views_, id);
        if (runs) note(uses_, id);
      };
      node.each_read(use);
      node.each_result(use);
      if (!runs) continue;
      node.each_write([&](ValueId id) { note(writes_, id); });
      node.each_result([&](ValueId id) { note(writes_, id); });
    }
    const auto external = program_.external_buffers();
    kept_ = external;
    for (const auto& output : program_.outputs)
      if (output.value != kNone) kept_[static_cast<size_t>(program_.buffer_of(output.value))] = 1;
    bytes_ = program_.buffer_bytes();
    new_at_.assign(program_.nodes.size(), 0);
    for (size_t b = 0; b < bytes_.size(); b++)
      if (!external[b] && !uses_with_views_[b].empty())
        new_at_[static_cast<size_t>(uses_with_views_[b][0])] += bytes_[b];
  }

  void consider(size_t n) {
    const auto& node = program_.nodes[n];
    ValueId found = kNone;
    size_t at = 0;
    node.each_result([&](ValueId id) {
      const auto b = static_cast<size_t>(program_.buffer_of(id));
      const auto& uses = uses_[b];
      if (found != kNone || kept_[b] || writes_[b].size() != 1 || bytes_[b] < kSmallestBytes ||
          !covers_buffer(program_, id, bytes_) || !program_[id].type.device.is_cpu())
        return;
      const auto next = std::lower_bound(uses.begin(), uses.end(), peak_);
      if (next == uses.end() || *next == peak_) return;  // not used after the peak, or used there
      found = id;
      at = static_cast<size_t>(*next);
    });
    if (found == kNone) return;
    Copy copy{n, at, {}};
    if (!operands_stay(n, at, is_cheap(node) ? nullptr : &copy.producers)) return;
    recomputed_.insert(program_.buffer_of(found));
    copies_.push_back(std::move(copy));
  }

  // Are the operands of node n in memory before node `at`? producers: if not null, gets the cheap nodes that compute
  // those that are not.
  bool operands_stay(size_t n, size_t at, std::vector<size_t>* producers) const {
    bool stay = true;
    program_.nodes[n].each_read([&](ValueId id) {
      const auto b = program_.buffer_of(id);
      const auto& uses = uses_[static_cast<size_t>(b)];
      const bool alive = kept_[static_cast<size_t>(b)] || (!uses.empty() && uses.back() >= static_cast<int32_t>(at));
      const auto& writes = writes_[static_cast<size_t>(b)];
      const bool written = std::any_of(writes.begin(), writes.end(), [&](int32_t w) {
        return w > static_cast<int32_t>(n) && w < static_cast<int32_t>(at);
      });
      if (alive && !written && !recomputed_.count(b)) return;
      const auto by = writes.size() == 1 ? static_cast<size_t>(writes[0]) : n;
      if (!stay || !producers || by >= n || !is_cheap(program_.nodes[by]) || !operands_stay(by, at, nullptr)) {
        stay = false;
      } else if (std::find(producers->begin(), producers->end(), by) == producers->end()) {
        producers->push_back(by);
      }
    });
    return stay;
  }

  void rewrite() {
    auto old_nodes = std::move(program_.nodes);
    struct SecondRun {
      std::vector<Node> producers;
      Node node;
    };
    std::map<size_t, std::vector<SecondRun>> again_before;
    for (const auto& copy : copies_) {
      SecondRun again{{}, old_nodes[copy.node]};
      for (const auto producer : copy.producers) again.producers.push_back(old_nodes[producer]);
      again_before[copy.at].push_back(std::move(again));
    }
    std::vector<Node> nodes;
    // The results of second runs, which later nodes read instead of the first ones.
    struct NewValues {
      std::map<int32_t, ValueId> result;  // by buffer of the first run
      std::map<ValueId, ValueId> value;   // values in these buffers: the same part of the new result
    };
    const auto moved = [&](NewValues& now, ValueId id) {
      const auto result = now.result.find(program_.buffer_of(id));
      if (result == now.result.end()) return id;
      const auto [at, is_new] = now.value.try_emplace(id, kNone);
      if (is_new) {
        const auto value = program_[id];
        at->second = program_.add_in(result->second, value.type, value.offset);
        nodes.push_back({find_op("aten.as_strided"),
                         {result->second, c10::IValue(value.type.sizes), c10::IValue(value.type.strides),
                          c10::IValue(value.offset)},
                         {at->second}});
      }
      return at->second;
    };
    const auto run_again = [&](Node node, NewValues& now, const auto& is_replaced) {
      for (auto& each : node.results) {
        auto* id = std::get_if<ValueId>(&each);
        if (!id || *id == kNone) continue;
        const auto old = *id;
        *id = program_.add(program_[old].type);
        if (!is_replaced(program_.buffer_of(old))) continue;
        now.result[program_.buffer_of(old)] = *id;
        now.value[old] = *id;
      }
      nodes.push_back(std::move(node));
    };
    NewValues now;
    for (size_t n = 0; n < old_nodes.size(); n++) {
      for (auto& again : again_before[n]) {
        NewValues of_producers;
        for (auto& producer : again.producers)
          run_again(std::move(producer), of_producers, [](int32_t) { return true; });
        again.node.replace_reads([&](ValueId id) { return moved(of_producers, id); });
        run_again(std::move(again.node), now, [&](int32_t buffer) { return recomputed_.count(buffer) > 0; });
      }
      auto& node = old_nodes[n];
      node.replace_reads([&](ValueId id) { return moved(now, id); });
      node.each_result([&](ValueId id) {  // a view that is taken after the second run
        const auto result = now.result.find(program_.buffer_of(id));
        if (result != now.result.end())
          program_.values[static_cast<size_t>(id)].buffer = program_.buffer_of(result->second);
      });
      nodes.push_back(std::move(node));
    }
    program_.nodes = std::move(nodes);
  }

  Program& program_;
  std::vector<std::vector<int32_t>> uses_, writes_, uses_with_views_;  // by buffer
  std::vector<char> kept_;                                             // by buffer: memory of the caller
  std::vector<int64_t> bytes_;
  std::vector<int64_t> curve_;   // bytes by node
  std::vector<int64_t> new_at_;  // by node: bytes of buffers that it uses first
  int32_t peak_ = 0;
  int64_t peak_bytes_ = 0;
  std::vector<Copy> copies_;
  std::set<int32_t> recomputed_;  // buffers of `copies_`
};

}  // namespace

namespace {

// Recomputes cheap values, and where that does not lower the peak, products of together at most `most_work`. The peak
// moves with each round.
Matched recompute_in_rounds(Program& program, double most_work) {
  Matched matched;
  int64_t before = 0;
  for (int64_t last = std::numeric_limits<int64_t>::max();;) {
    Recompute round(program);
    const auto peak = round.peak_bytes();
    if (last == std::numeric_limits<int64_t>::max()) before = peak;
    if (matched.times > 0) matched.note = c10::str("peak of ", before, " bytes, now ", peak);
    if (peak >= last) return matched;  // the prediction was too low
    last = peak;
    if (const auto added = round.run()) {
      matched.times += added;
    } else {
      const auto work = round.run_products(most_work, matched.times);
      if (work == 0) return matched;
      most_work -= work;
    }
  }
}

}  // namespace

Matched recompute(Program& program) { return recompute_in_rounds(program, 0); }

Matched recompute_products(Program& program, const PassSettings& settings) {
  double work = 0;
  for (const auto& node : program.nodes) work += work_of(program, node);
  return recompute_in_rounds(program, 0.01 * static_cast<double>(settings.at("percent")) * work);
}

}  // namespace tessera::compiler
