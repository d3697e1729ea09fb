#include "tessera/compile/detail/ir/def_use.h"
#include "tessera/compile/detail/ir/dependencies.h"
#include "tessera/compile/detail/ir/op_table.h"
#include "tessera/compile/detail/passes/op_variants.h"
#include "tessera/compile/detail/passes/passes.h"
#include "tessera/compile/detail/report/memory_curve.h"

#include <algorithm>
#include <map>
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
  return is_pure(node) && (node.name() == "aten.native_layer_norm" || is_pointwise(node.op));
}

// Multiplications of a matrix product on the CPU; 0 for other nodes.
double work_of(const Program& program, const Node& node) {
  const auto name = node.name();
  if (name != "aten.mm" && name != "aten.addmm") return 0;
  const auto* a = std::get_if<ValueId>(&node.args[name == "aten.addmm"]);
  const auto* out = std::get_if<ValueId>(&node.results[0]);
  if (!a || !out || *a == kNone || *out == kNone || !program[*out].type.device.is_cpu()) return 0;
  return static_cast<double>(program[*out].type.numel()) * static_cast<double>(program[*a].type.sizes[1]);
}

class Recompute {
 public:
  explicit Recompute(Program& program) : program_(program) {}

  // Returns the number of ops that are added. If the peak would not be lower, none.
  int64_t run() {
    find_peak();
    for (int32_t n = 0; n < peak_; n++)
      if (is_cheap(program_.nodes[static_cast<size_t>(n)])) consider(static_cast<size_t>(n));
    return rewrite_if_lower() ? static_cast<int64_t>(copies_.size()) : 0;
  }

  // Recomputes results of products of together at most this much work, half of what that allows. Returns their
  // work; 0 if none lowers the peak.
  double run_products(double most_work, int64_t& times) {
    find_peak();
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

  // The peak after rewrite() is at least this: recomputed buffers are free between their last use before the second run
  // and that run; what the second runs need besides is not counted.
  int64_t lowest_peak() const {
    std::vector<int64_t> change(curve_.size() + 1, 0);
    for (const auto& copy : copies_)
      program_.nodes[copy.node].each_result([&](ValueId id) {
        const auto b = static_cast<size_t>(program_.buffer_of(id));
        if (!recomputed_.count(static_cast<int32_t>(b))) return;
        const auto& uses = uses_with_views_[b];
        const auto before = std::lower_bound(uses.begin(), uses.end(), static_cast<int32_t>(copy.at)) - 1;
        change[static_cast<size_t>(*before) + 1] -= bytes_[b];
        change[copy.at] += bytes_[b];
      });
    int64_t sum = 0, peak = 0;
    for (size_t n = 0; n < curve_.size(); n++) peak = std::max(peak, curve_[n] + (sum += change[n]));
    return peak;
  }

  bool rewrite_if_lower() {
    if (copies_.empty() || lowest_peak() >= peak_bytes_) return false;
    const auto before = program_;
    rewrite();
    if (memory_curve(program_, nullptr).peak() < peak_bytes_) return true;
    program_ = before;
    return false;
  }

  // Where each buffer is used and written, by nodes that run.
  void read_program() {
    uses_.assign(static_cast<size_t>(program_.buffers), {});
    uses_with_views_ = writes_ = uses_;
    for (size_t n = 0; n < program_.nodes.size(); n++) {
      const auto& node = program_.nodes[n];
      const auto note = [&](auto& list) {
        return [&list, n, this](ValueId id) {
          auto& at = list[static_cast<size_t>(program_.buffer_of(id))];
          if (at.empty() || at.back() != static_cast<int32_t>(n)) at.push_back(static_cast<int32_t>(n));
        };
      };
      node.each_read(note(uses_with_views_));
      node.each_result(note(uses_with_views_));
      if (is_view(program_, node)) continue;
      node.each_read(note(uses_));
      node.each_result(note(uses_));
      node.each_write(note(writes_));
      node.each_result(note(writes_));
    }
    const DefUse def_use(program_);
    kept_ = def_use.external;
    for (size_t b = 0; b < kept_.size(); b++) kept_[b] |= def_use.has_output[b];
    bytes_ = program_.buffer_bytes();
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
  std::vector<int64_t> curve_;  // bytes by node
  int32_t peak_ = 0;
  int64_t peak_bytes_ = 0;
  std::vector<Copy> copies_;
  std::set<int32_t> recomputed_;  // buffers of `copies_`
};

}  // namespace

// The peak moves with each round.
Matched recompute(Program& program) {
  const auto before = memory_curve(program, nullptr).peak();
  Matched matched;
  while (const auto times = Recompute(program).run()) matched.times += times;
  if (matched.times > 0)
    matched.note = c10::str("peak of ", before, " bytes, now ", memory_curve(program, nullptr).peak());
  return matched;
}

Matched recompute_products(Program& program, const PassSettings& settings) {
  const auto before = memory_curve(program, nullptr).peak();
  double budget = 0;
  for (const auto& node : program.nodes) budget += work_of(program, node);
  budget *= 0.01 * static_cast<double>(settings.at("percent"));
  Matched matched;
  while (const auto work = Recompute(program).run_products(budget, matched.times)) {
    budget -= work;
    while (const auto times = Recompute(program).run()) matched.times += times;
  }
  if (matched.times > 0)
    matched.note = c10::str("peak of ", before, " bytes, now ", memory_curve(program, nullptr).peak());
  return matched;
}

}  // namespace tessera::compiler
