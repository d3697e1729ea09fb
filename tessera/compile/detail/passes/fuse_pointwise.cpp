#include "tessera/compile/detail/codegen/source.h"
#include "tessera/compile/detail/ir/op_table.h"
#include "tessera/compile/detail/passes/passes.h"

#include <algorithm>
#include <set>

// Pointwise ops that follow one another over equally many elements become one generated function; views between them
// stay. What only they touch is a variable of the function's loop and needs no memory.
//
//   %3: f32[8] = aten.cat([%1, %2], 0)            %4: f32[8] = aten.empty_strided([8], [1], ...)
//   %4: f32[8] = aten.div.Tensor(%3, 2)     ->    tessera.cpp_kernel([%4!], [%1, %2], "cpp_fused_cat_div_0")
//
// A loop computes all ops of a group for element i, then for i + 1. That is right if what they read and write is either
// the same memory, element by element, or does not overlap.
namespace tessera::compiler {
namespace {

using codegen::Assignment;
using codegen::Place;
using codegen::place_of;

constexpr size_t kMostInALoop = 32;  // ops; beyond that registers run out
constexpr size_t kMostInAName = 10;  // as PyTorch's names

// Memory that a loop reads or writes.
struct Use {
  Place place;
  int64_t begin, end;  // bytes of the buffer
  bool written, shifted;
  size_t loop;

  Use(const Program& program, ValueId id, bool written, bool shifted, size_t loop)
      : place(place_of(program, id)), written(written), shifted(shifted), loop(loop) {
    const auto& value = program[id];
    begin = value.offset * value.type.itemsize();
    end = begin + value.type.span() * value.type.itemsize();
  }
  bool clashes_with(const Use& other) const {
    if (place.buffer != other.place.buffer || end <= other.begin || other.end <= begin) return false;
    if (!written && !other.written) return false;
    return place != other.place || shifted || other.shifted || loop != other.loop;
  }
};

struct Group {
  std::vector<size_t> nodes;
  std::vector<std::vector<Assignment>> loops;
  std::vector<Use> uses;
  std::set<int32_t> touched;      // buffers
  std::set<int32_t> read_before;  // buffers that are read before the group has written them
  std::set<int32_t> local;        // buffers, once the group is closed
};

class Fusion {
 public:
  explicit Fusion(Program& program) : program_(program) {}

  Matched run() {
    for (size_t n = 0; n < program_.nodes.size(); n++) {
      if (stands_still(program_.nodes[n])) continue;
      auto assignments = codegen::assignments_of(program_, program_.nodes[n]);
      if (assignments.size() != 1 || !join(n, assignments[0])) {
        close();
        if (!assignments.empty()) open(n, std::move(assignments));
      }
    }
    close();
    find_locals();
    rewrite();
    return {static_cast<int64_t>(groups_.size())};
  }

 private:
  // Does nothing when the program runs.
  bool stands_still(const Node& node) const { return is_view(program_, node) || kind_of(node) == OpKind::Empty; }

  // Adds what the assignment touches; false, and nothing is added, if it clashes with what the group does.
  bool add_uses(const Assignment& each, size_t loop) {
    std::vector<Use> uses;
    for (const auto piece : each.pieces) uses.emplace_back(program_, piece, false, true, loop);
    for (size_t i = 0; i < each.operands.size(); i++)
      if (const auto* id = std::get_if<ValueId>(&each.operands[i]))
        uses.emplace_back(program_, *id, false, false, loop);
    uses.emplace_back(program_, each.into, true, false, loop);
    for (const auto& use : uses) {
      const auto clashes = [&](const Use& other) { return use.clashes_with(other); };
      if (std::any_of(uses.begin(), uses.end(), clashes) ||
          std::any_of(group_.uses.begin(), group_.uses.end(), clashes))
        return false;
    }
    for (const auto& use : uses) {
      const bool was_written = std::any_of(group_.uses.begin(), group_.uses.end(),
                                           [&](const Use& other) { return other.written && other.place == use.place; });
      if (!use.written && !was_written) group_.read_before.insert(use.place.buffer);
      group_.touched.insert(use.place.buffer);
    }
    group_.uses.insert(group_.uses.end(), uses.begin(), uses.end());
    return true;
  }

  void open(size_t n, std::vector<Assignment> assignments) {
    for (auto& each : assignments) {
      if (!add_uses(each, group_.loops.size())) {
        group_ = {};
        return;
      }
      group_.loops.push_back({std::move(each)});
    }
    group_.nodes = {n};
  }

  bool join(size_t n, const Assignment& next) {
    if (group_.loops.size() != 1 || group_.loops[0].size() == kMostInALoop) return false;
    auto& loop = group_.loops[0];
    if (!codegen::in_step(program_[loop[0].into].type, program_[next.into].type)) return false;
    const auto is_cat = [](const Assignment& each) { return !each.pieces.empty(); };
    if (is_cat(next) && std::any_of(loop.begin(), loop.end(), is_cat)) return false;
    if (!add_uses(next, 0)) return false;
    loop.push_back(next);
    group_.nodes.push_back(n);
    return true;
  }

  // A cat alone is a copy of memory, which LibTorch does as well.
  void close() {
    const bool cat_alone = group_.nodes.size() == 1 && !group_.loops[0][0].pieces.empty();
    if (!group_.nodes.empty() && !cat_alone) groups_.push_back(std::move(group_));
    group_ = {};
  }

  // Buffers that are seen nowhere but in their group.
  void find_locals() {
    constexpr int32_t kNobody = -1, kOthers = -2;
    std::vector<int32_t> owner(static_cast<size_t>(program_.buffers), kNobody);
    const auto external = program_.external_buffers();
    for (size_t b = 0; b < owner.size(); b++)
      if (external[b]) owner[b] = kOthers;
    for (const auto& output : program_.outputs)
      if (output.value != kNone) owner[static_cast<size_t>(program_.buffer_of(output.value))] = kOthers;
    group_of_.assign(program_.nodes.size(), kOthers);
    for (size_t g = 0; g < groups_.size(); g++)
      for (const auto n : groups_[g].nodes) group_of_[n] = static_cast<int32_t>(g);
    for (size_t n = 0; n < program_.nodes.size(); n++) {
      const auto& node = program_.nodes[n];
      if (stands_still(node)) continue;
      const auto touch = [&](ValueId id) {
        auto& by = owner[static_cast<size_t>(program_.buffer_of(id))];
        by = by == kNobody || by == group_of_[n] ? group_of_[n] : kOthers;
      };
      node.each_read(touch);
      node.each_result(touch);
    }
    for (size_t g = 0; g < groups_.size(); g++)
      for (const auto buffer : groups_[g].touched)
        if (owner[static_cast<size_t>(buffer)] == static_cast<int32_t>(g) && !groups_[g].read_before.count(buffer))
          groups_[g].local.insert(buffer);
  }

  std::string name_of(const Group& group) const {
    std::set<std::string> ops;
    for (const auto n : group.nodes) {
      const auto name = program_.nodes[n].name();
      auto op = name.substr(name.find('.') + 1);
      op = op.substr(0, op.find('.'));
      while (op.back() == '_') op.pop_back();
      ops.insert(op);
    }
    std::string name = "cpp_fused";
    size_t named = 0;
    for (const auto& op : ops)
      if (named++ < kMostInAName) name += "_" + op;
    return name + "_" + std::to_string(program_.kernels.size());
  }

  Node empty(ValueId id) const {
    const auto& type = program_[id].type;
    return {find_op("aten.empty_strided"),
            {c10::IValue(type.sizes), c10::IValue(type.strides), c10::IValue(static_cast<int64_t>(type.dtype)),
             c10::IValue(), c10::IValue(type.device), c10::IValue()},
            {id}};
  }

  void rewrite() {
    std::set<int32_t> local;
    for (const auto& group : groups_) local.insert(group.local.begin(), group.local.end());
    std::vector<ValueId> instead(program_.values.size());
    for (size_t v = 0; v < instead.size(); v++) instead[v] = static_cast<ValueId>(v);
    const auto replaced = [&](ValueId id) { return instead[static_cast<size_t>(id)]; };
    std::vector<Node> kept;
    for (size_t n = 0; n < program_.nodes.size(); n++) {
      auto& node = program_.nodes[n];
      node.replace_reads(replaced);
      const auto g = group_of_[n];
      if (g < 0) {
        bool seen = !stands_still(node);
        node.each_result([&](ValueId id) { seen |= local.count(program_.buffer_of(id)) == 0; });
        if (seen) kept.push_back(std::move(node));
        continue;
      }
      const auto& group = groups_[static_cast<size_t>(g)];
      if (n == group.nodes[0])
        for (const auto member : group.nodes) define_results(program_.nodes[member], local, instead, kept);
      if (n != group.nodes.back()) continue;
      kept.push_back(kernel_of(group, node.module));
      kept.back().replace_reads(replaced);
    }
    for (auto& output : program_.outputs)
      if (output.value != kNone) output.value = replaced(output.value);
    program_.nodes = std::move(kept);
  }

  // What the op makes is memory that the function fills; what it writes into an argument is that argument.
  void define_results(const Node& node, const std::set<int32_t>& local, std::vector<ValueId>& instead,
                      std::vector<Node>& kept) const {
    const bool in_place = node.schema().is_mutable();
    node.each_result([&](ValueId id) {
      if (in_place)
        instead[static_cast<size_t>(id)] = instead[static_cast<size_t>(std::get<ValueId>(node.args[0]))];
      else if (!local.count(program_.buffer_of(id)))
        kept.push_back(empty(id));
    });
  }

  Node kernel_of(const Group& group, const std::string& module) {
    const auto name = name_of(group);
    auto source = codegen::write_kernel(program_, name, group.loops,
                                        [&](int32_t buffer) { return group.local.count(buffer) > 0; });
    program_.kernels[name] = std::move(source.text);
    return {find_op("tessera.cpp_kernel"), {source.outs, source.ins, c10::IValue(name)}, {}, module};
  }

  Program& program_;
  Group group_;  // that is being gathered
  std::vector<Group> groups_;
  std::vector<int32_t> group_of_;  // by node
};

}  // namespace

Matched fuse_pointwise(Program& program) { return Fusion(program).run(); }

}  // namespace tessera::compiler
