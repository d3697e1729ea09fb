#include "tessera/compile/detail/ir/def_use.h"
#include "tessera/compile/detail/ir/op_table.h"
#include "tessera/compile/detail/passes/op_variants.h"
#include "tessera/compile/detail/passes/passes.h"

#include <algorithm>
#include <optional>

// Functionalization: replaces in-place ops on the program's own memory by their functional variants.
//
//   %2: f32[8] in %1 = aten.mul_.Tensor(%1!, 2)            %2: f32[8] = aten.mul.Tensor(%1, 2)
//   %3: f32[8] = aten.neg(%1)                       ->     %3: f32[8] = aten.neg(%2)
//   %4: f32[8] in %3 = aten.copy_(%3!, %2, false)          (%4 is %2)
//
// Then other passes can find equal and unused expressions. Law: x.mul_(y) may define a new buffer if it writes all of
// x's buffer, and all later reads go through the written value or a view made after the write. (Values name memory: a
// view made before the write sees the write too.) Writes to external and retained buffers stay in place.
//
// The pass walks backwards: once a later write has its own buffer, the reads behind it no longer count for an earlier
// write.
namespace tessera::compiler {
namespace {

bool same_memory(const Value& a, const Value& b) {
  return a.buffer == b.buffer && a.offset == b.offset && a.type == b.type;
}

class Functionalise {
 public:
  explicit Functionalise(Program& program) : program_(program), def_use_(program), bytes_(program.buffer_bytes()) {
    touched_.resize(static_cast<size_t>(program.buffers));
    for (size_t n = 0; n < program.nodes.size(); n++) {
      const auto note = [&](ValueId id) {
        auto& list = touched_[static_cast<size_t>(program.buffer_of(id))];
        if (list.empty() || list.back() != n) list.push_back(n);
      };
      program.nodes[n].each_read(note);
      program.nodes[n].each_result(note);
    }
    outputs_.resize(static_cast<size_t>(program.buffers));
    for (size_t o = 0; o < program.outputs.size(); o++)
      if (program.outputs[o].value != kNone)
        outputs_[static_cast<size_t>(program.buffer_of(program.outputs[o].value))].push_back(o);
    writes_ = def_use_.writes;
  }

  Matched run() {
    Matched matched;
    std::vector<char> removed(program_.nodes.size(), 0);
    for (size_t n = program_.nodes.size(); n-- > 0;) {
      auto& node = program_.nodes[n];
      if (!node.schema().is_mutable() || kind_of(node) != OpKind::Plain || is_generated(node)) continue;
      if (node.name() == "aten.copy_") {
        if (!replace_copy_by_source(n, node)) continue;
        removed[n] = 1;
      } else if (!make_functional(n, node)) {
        continue;
      }
      matched.times++;
    }
    size_t n = 0;
    std::erase_if(program_.nodes, [&](const Node&) { return removed[n++] != 0; });
    return matched;
  }

 private:
  static size_t at(ValueId id) { return static_cast<size_t>(id); }
  size_t buffer(ValueId id) const { return at(program_.buffer_of(id)); }

  // True if the write to x at node n may go to another buffer.
  bool can_move(ValueId x, size_t n) const {
    const auto b = buffer(x);
    if (def_use_.external[b] || def_use_.retained[b] || !covers_buffer(program_, x, bytes_)) return false;
    bool aliased = false;
    const auto check = [&](ValueId id) {
      aliased |= buffer(id) == b && def_use_.def_node[at(id)] < static_cast<int32_t>(n) &&
                 !same_memory(program_[id], program_[x]);
    };
    const auto& list = touched_[b];
    for (auto later = std::upper_bound(list.begin(), list.end(), n); later != list.end() && !aliased; later++)
      program_.nodes[*later].each_read(check);
    for (const auto o : outputs_[b]) check(program_.outputs[o].value);
    return !aliased;
  }

  // From node n on, replaces x by `now` and moves the later values of x's buffer into the buffer of `now`.
  void move(ValueId x, ValueId now, size_t n) {
    const auto from = buffer(x), to = buffer(now);
    const auto old = program_[x];
    const auto shift = program_[now].offset * old.type.itemsize();  // bytes
    const auto renamed = [&](ValueId id) {
      return def_use_.def_node[at(id)] <= static_cast<int32_t>(n) && same_memory(program_[id], old) ? now : id;
    };
    auto& list = touched_[from];
    const auto later = std::upper_bound(list.begin(), list.end(), n);
    for (auto each = later; each != list.end(); each++) {
      program_.nodes[*each].replace_reads(renamed);
      program_.nodes[*each].each_result([&](ValueId id) {
        if (buffer(id) != from) return;
        auto& value = program_.values[at(id)];
        value.buffer = static_cast<int32_t>(to);
        value.offset += shift / value.type.itemsize();
      });
      if (kind_of(program_.nodes[*each]) != OpKind::Wait)
        program_.nodes[*each].each_write([&](ValueId id) {
          if (buffer(id) != to) return;
          writes_[from]--;
          writes_[to]++;
        });
    }
    auto& moved = touched_[to];
    std::vector<size_t> both;
    std::set_union(moved.begin(), moved.end(), later, list.end(), std::back_inserter(both));
    moved = std::move(both);
    list.erase(later, list.end());
    for (const auto o : outputs_[from]) {
      auto& output = program_.outputs[o];
      output.value = renamed(output.value);
    }
    auto& out = outputs_[from];
    outputs_[to].insert(outputs_[to].end(), out.begin(), out.end());
    out.clear();
  }

  ValueId new_value(const Type& type, size_t n) {
    program_.values.push_back({type});
    def_use_.def_node.push_back(static_cast<int32_t>(n));
    return static_cast<ValueId>(program_.values.size() - 1);
  }
  // Gives a value that node n defines its own buffer.
  void give_own_buffer(ValueId id, size_t n) {
    program_.values[at(id)].buffer = program_.buffers++;
    program_.values[at(id)].offset = 0;
    bytes_.push_back(program_[id].type.bytes());
    touched_.push_back({n});
    outputs_.emplace_back();
    writes_.push_back(0);
    def_use_.external.push_back(0);
    def_use_.retained.push_back(0);
  }

  bool make_functional(size_t n, Node& node) {
    const auto variant = functional_variant(node.op);
    if (!variant) return false;
    const auto* one = std::get_if<ValueId>(&node.args[0]);
    const auto targets = one ? ValueList{*one} : std::get<ValueList>(node.args[0]);
    for (size_t i = 0; i < targets.size(); i++) {
      if (targets[i] == kNone || !can_move(targets[i], n)) return false;
      for (size_t k = 0; k < i; k++)
        if (buffer(targets[i]) == buffer(targets[k])) return false;
    }
    Node functional{*variant, node.args, {}, node.module};
    const auto types = result_types(program_, functional);
    if (!types || types->size() != targets.size()) return false;
    for (size_t i = 0; i < targets.size(); i++)
      if ((*types)[i] != program_[targets[i]].type) return false;
    ValueList results;
    for (const auto x : targets) {
      writes_[buffer(x)]--;
      const auto result = one ? std::get<ValueId>(node.results[0]) : new_value(program_[x].type, n);
      give_own_buffer(result, n);
      move(x, result, n);
      results.push_back(result);
    }
    functional.results = one ? std::vector<Arg>{results[0]} : std::vector<Arg>{results};
    node = std::move(functional);
    return true;
  }

  // copy_(x, source) over a full buffer: later reads of x read `source`, if it has the same type and no later writes.
  bool replace_copy_by_source(size_t n, const Node& node) {
    const auto x = std::get<ValueId>(node.args[0]);
    const auto* source = std::get_if<ValueId>(&node.args[1]);
    if (!source || *source == kNone || buffer(*source) == buffer(x) || !can_move(x, n)) return false;
    const auto s = buffer(*source);
    if (program_[*source].type != program_[x].type || !outputs_[buffer(x)].empty()) return false;
    if (written_after(s, n) || written_after(buffer(x), n)) return false;
    writes_[buffer(x)]--;
    move(x, *source, n);
    return true;
  }
  bool written_after(size_t b, size_t n) const {
    if (writes_[b] == 0) return false;
    const auto& list = touched_[b];
    bool written = false;
    for (auto later = std::upper_bound(list.begin(), list.end(), n); later != list.end(); later++)
      program_.nodes[*later].each_write([&](ValueId id) { written |= buffer(id) == b; });
    return written;
  }

  Program& program_;
  DefUse def_use_;
  std::vector<int64_t> bytes_;
  std::vector<std::vector<size_t>> touched_;  // by buffer: nodes that read it or define values in it, in order
  std::vector<std::vector<size_t>> outputs_;  // by buffer: indices of outputs
  std::vector<int32_t> writes_;               // by buffer
};

}  // namespace

Matched functionalise(Program& program) { return Functionalise(program).run(); }

}  // namespace tessera::compiler
