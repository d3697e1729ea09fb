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
// Law: a pure op gives the same values again if nothing has written its operands in between.
namespace tessera::compiler {
namespace {

constexpr int64_t kSmallestBytes = 65536;  // smaller buffers are not worth a call

bool is_cheap(const Node& node) {
  return is_pure(node) && (node.name() == "aten.native_layer_norm" || is_pointwise(node.op));
}

class Recompute {
 public:
  explicit Recompute(Program& program) : program_(program) {}

  // Returns the number of ops that are added. If the peak would not be lower, none.
  int64_t run() {
    read_program();
    const auto curve = memory_curve(program_, nullptr).own;
    if (curve.empty()) return 0;
    peak_ = static_cast<int32_t>(std::max_element(curve.begin(), curve.end()) - curve.begin());
    for (size_t n = 0; n < static_cast<size_t>(peak_); n++) consider(n);
    if (copies_.empty()) return 0;
    const auto before = program_;
    rewrite();
    if (memory_curve(program_, nullptr).peak() < curve[static_cast<size_t>(peak_)])
      return static_cast<int64_t>(copies_.size());
    program_ = before;
    return 0;
  }

 private:
  struct Copy {
    size_t node;
    size_t at;  // the first use after the peak: the op runs again before this node
  };

  // Where each buffer is used and written, by nodes that run.
  void read_program() {
    uses_.assign(static_cast<size_t>(program_.buffers), {});
    writes_ = uses_;
    for (size_t n = 0; n < program_.nodes.size(); n++) {
      const auto& node = program_.nodes[n];
      if (is_view(program_, node)) continue;
      const auto note = [&](auto& list) {
        return [&list, n, this](ValueId id) {
          auto& at = list[static_cast<size_t>(program_.buffer_of(id))];
          if (at.empty() || at.back() != static_cast<int32_t>(n)) at.push_back(static_cast<int32_t>(n));
        };
      };
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
    if (!is_cheap(node)) return;
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
    if (found == kNone || !operands_stay(n, at)) return;
    recomputed_.insert(program_.buffer_of(found));
    copies_.push_back({n, at});
  }

  bool operands_stay(size_t n, size_t at) const {
    bool stay = true;
    program_.nodes[n].each_read([&](ValueId id) {
      const auto b = program_.buffer_of(id);
      const auto& uses = uses_[static_cast<size_t>(b)];
      const bool alive = kept_[static_cast<size_t>(b)] || (!uses.empty() && uses.back() >= static_cast<int32_t>(at));
      const auto& writes = writes_[static_cast<size_t>(b)];
      const bool written = std::any_of(writes.begin(), writes.end(), [&](int32_t w) {
        return w > static_cast<int32_t>(n) && w < static_cast<int32_t>(at);
      });
      stay &= alive && !written && !recomputed_.count(b);
    });
    return stay;
  }

  void rewrite() {
    auto old_nodes = std::move(program_.nodes);
    std::map<size_t, std::vector<Node>> again_before;
    for (const auto& copy : copies_) again_before[copy.at].push_back(old_nodes[copy.node]);
    std::map<int32_t, ValueId> new_result;  // by buffer that is not kept: the result of the second run
    std::map<ValueId, ValueId> new_value;   // values in these buffers: the same part of the new result
    std::vector<Node> nodes;
    const auto moved = [&](ValueId id) {
      const auto result = new_result.find(program_.buffer_of(id));
      if (result == new_result.end()) return id;
      const auto [at, is_new] = new_value.try_emplace(id, kNone);
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
    for (size_t n = 0; n < old_nodes.size(); n++) {
      for (auto& again : again_before[n]) {
        for (auto& each : again.results) {
          auto* id = std::get_if<ValueId>(&each);
          if (!id || *id == kNone) continue;
          const auto old = *id;
          *id = program_.add(program_[old].type);
          if (!recomputed_.count(program_.buffer_of(old))) continue;
          new_result[program_.buffer_of(old)] = *id;
          new_value[old] = *id;
        }
        nodes.push_back(std::move(again));
      }
      auto& node = old_nodes[n];
      node.replace_reads(moved);
      node.each_result([&](ValueId id) {  // a view that is taken after the second run
        const auto result = new_result.find(program_.buffer_of(id));
        if (result != new_result.end())
          program_.values[static_cast<size_t>(id)].buffer = program_.buffer_of(result->second);
      });
      nodes.push_back(std::move(node));
    }
    program_.nodes = std::move(nodes);
  }

  Program& program_;
  std::vector<std::vector<int32_t>> uses_, writes_;  // by buffer
  std::vector<char> kept_;                           // by buffer: memory of the caller
  std::vector<int64_t> bytes_;
  int32_t peak_ = 0;
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

}  // namespace tessera::compiler
