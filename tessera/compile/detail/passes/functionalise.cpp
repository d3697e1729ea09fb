#include "tessera/compile/detail/ir/op_table.h"
#include "tessera/compile/detail/ir/def_use.h"
#include "tessera/compile/detail/passes/op_variants.h"
#include "tessera/compile/detail/passes/passes.h"

#include <algorithm>
#include <optional>

// An op that writes into memory the program made gives memory of its own instead, where nobody sees the difference:
//
//   %2: f32[8] in %1 = aten.mul_.Tensor(%1!, 2)            %2: f32[8] = aten.mul.Tensor(%1, 2)
//   %3: f32[8] = aten.neg(%1)                       ->     %3: f32[8] = aten.neg(%2)
//   %4: f32[8] in %3 = aten.copy_(%3!, %2, false)          (%4 is %2)
//
// so that other passes see what is the same, and what nobody reads. That is so if what is written is all of a buffer,
// and whoever reads the buffer later does so through the written value, or a view made after the write: values name
// memory, and a view made before the write shows what was written, too. Memory from outside, or that somebody holds, is
// written as it was.
//
// From the end: once a later write has memory of its own, the reads behind it do not count for an earlier one.
namespace tessera::compiler {
namespace {

bool same_place(const Value& a, const Value& b) {
  return a.buffer == b.buffer && a.offset == b.offset && a.type == b.type;
}

class Functionalise {
 public:
  explicit Functionalise(Program& program) : program_(program), uses_(program), bytes_(program.buffer_bytes()) {
    touched_.resize(static_cast<size_t>(program.buffers));
    for (size_t n = 0; n < program.nodes.size(); n++) {
      const auto touch = [&](ValueId id) {
        auto& list = touched_[static_cast<size_t>(program.buffer_of(id))];
        if (list.empty() || list.back() != n) list.push_back(n);
      };
      program.nodes[n].each_read(touch);
      program.nodes[n].each_result(touch);
    }
    outputs_.resize(static_cast<size_t>(program.buffers));
    for (size_t o = 0; o < program.outputs.size(); o++)
      if (program.outputs[o].value != kNone)
        outputs_[static_cast<size_t>(program.buffer_of(program.outputs[o].value))].push_back(o);
    writes_ = uses_.writes;
  }

  Matched run() {
    Matched matched;
    std::vector<char> gone(program_.nodes.size(), 0);
    for (size_t n = program_.nodes.size(); n-- > 0;) {
      auto& node = program_.nodes[n];
      if (!node.schema().is_mutable() || kind_of(node) != OpKind::Plain || is_generated(node)) continue;
      if (node.name() == "aten.copy_") {
        if (!copy_is_its_source(n, node)) continue;
        gone[n] = 1;
      } else if (!becomes_pure(n, node)) {
        continue;
      }
      matched.times++;
    }
    size_t n = 0;
    std::erase_if(program_.nodes, [&](const Node&) { return gone[n++] != 0; });
    return matched;
  }

 private:
  static size_t at(ValueId id) { return static_cast<size_t>(id); }
  size_t buffer(ValueId id) const { return at(program_.buffer_of(id)); }

  // May what is written through x at node n lie elsewhere from then on?
  bool can_move(ValueId x, size_t n) const {
    const auto b = buffer(x);
    if (uses_.external[b] || uses_.bound[b] || !is_whole(program_, x, bytes_)) return false;
    bool others = false;
    const auto look = [&](ValueId id) {
      others |=
          buffer(id) == b && uses_.made_by[at(id)] < static_cast<int32_t>(n) && !same_place(program_[id], program_[x]);
    };
    const auto& list = touched_[b];
    for (auto later = std::upper_bound(list.begin(), list.end(), n); later != list.end() && !others; later++)
      program_.nodes[*later].each_read(look);
    for (const auto o : outputs_[b]) look(program_.outputs[o].value);
    return !others;
  }

  // From node n on, what lay in the buffer of x lies in that of `now`; x itself is `now`.
  void move(ValueId x, ValueId now, size_t n) {
    const auto from = buffer(x), to = buffer(now);
    const auto old = program_[x];
    const auto shift = program_[now].offset * old.type.itemsize();  // bytes
    const auto renamed = [&](ValueId id) {
      return uses_.made_by[at(id)] <= static_cast<int32_t>(n) && same_place(program_[id], old) ? now : id;
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
    uses_.made_by.push_back(static_cast<int32_t>(n));
    return static_cast<ValueId>(program_.values.size() - 1);
  }
  // A buffer of its own for a value that node n makes.
  void separate(ValueId id, size_t n) {
    program_.values[at(id)].buffer = program_.buffers++;
    program_.values[at(id)].offset = 0;
    bytes_.push_back(program_[id].type.bytes());
    touched_.push_back({n});
    outputs_.emplace_back();
    writes_.push_back(0);
    uses_.external.push_back(0);
    uses_.bound.push_back(0);
  }

  bool becomes_pure(size_t n, Node& node) {
    const auto form = functional_form(node.op);
    if (!form) return false;
    const auto* one = std::get_if<ValueId>(&node.args[0]);
    const auto targets = one ? ValueList{*one} : std::get<ValueList>(node.args[0]);
    for (size_t i = 0; i < targets.size(); i++) {
      if (targets[i] == kNone || !can_move(targets[i], n)) return false;
      for (size_t k = 0; k < i; k++)
        if (buffer(targets[i]) == buffer(targets[k])) return false;
    }
    Node pure{*form, node.args, {}, node.module};
    const auto types = result_types(program_, pure);
    if (!types || types->size() != targets.size()) return false;
    for (size_t i = 0; i < targets.size(); i++)
      if ((*types)[i] != program_[targets[i]].type) return false;
    ValueList results;
    for (const auto x : targets) {
      writes_[buffer(x)]--;
      const auto result = one ? std::get<ValueId>(node.results[0]) : new_value(program_[x].type, n);
      separate(result, n);
      move(x, result, n);
      results.push_back(result);
    }
    pure.results = one ? std::vector<Arg>{results[0]} : std::vector<Arg>{results};
    node = std::move(pure);
    return true;
  }

  // What is copied over all of a buffer is the source, if that stays as it is, and lies the same way.
  bool copy_is_its_source(size_t n, const Node& node) {
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
  Uses uses_;
  std::vector<int64_t> bytes_;
  std::vector<std::vector<size_t>> touched_;  // by buffer: nodes that read it or make values in it, in order
  std::vector<std::vector<size_t>> outputs_;  // by buffer
  std::vector<int32_t> writes_;               // by buffer
};

}  // namespace

Matched functionalise(Program& program) { return Functionalise(program).run(); }

}  // namespace tessera::compiler
