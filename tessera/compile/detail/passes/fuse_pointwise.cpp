#include "tessera/compile/detail/codegen/kernel_source.h"
#include "tessera/compile/detail/ir/def_use.h"
#include "tessera/compile/detail/ir/op_table.h"
#include "tessera/compile/detail/passes/passes.h"

#include <algorithm>
#include <map>
#include <set>

// Kernel fusion: consecutive pointwise ops over the same number of elements become one generated C++ function. Views
// between them stay. A buffer that only these ops use becomes a local variable of the loop and needs no memory.
//
//   %3: f32[8] = aten.cat([%1, %2], 0)            %4: f32[8] = aten.empty_strided([8], [1], ...)
//   %4: f32[8] = aten.div.Tensor(%3, 2)     ->    tessera.cpp_kernel([%4!], [%1, %2], "cpp_fused_cat_div_0")
//
// Law: a loop computes all ops of a group for element i, then for i + 1. This is correct if any two accesses of the
// group are to the same elements in the same order, or do not overlap.
namespace tessera::compiler {
namespace {

using codegen::Assignment;
using codegen::location_of;
using codegen::MemoryLocation;

constexpr size_t kMaxOpsPerLoop = 32;  // more would run out of registers
constexpr size_t kMaxOpsInName = 10;   // as in PyTorch Inductor

// A memory access of a loop.
struct LoopAccess {
  MemoryLocation location;
  int64_t begin, end;  // bytes of the buffer
  bool written;
  bool shifted;  // element i of the loop is not element i of the value: an operand of cat
  size_t loop;

  LoopAccess(const Program& program, ValueId id, bool written, bool shifted, size_t loop)
      : location(location_of(program, id)), written(written), shifted(shifted), loop(loop) {
    const auto& value = program[id];
    begin = value.offset * value.type.itemsize();
    end = begin + value.type.span() * value.type.itemsize();
  }
  bool conflicts_with(const LoopAccess& other) const {
    if (location.buffer != other.location.buffer || end <= other.begin || other.end <= begin) return false;
    if (!written && !other.written) return false;
    return location != other.location || shifted || other.shifted || loop != other.loop;
  }
};

struct FusionGroup {
  std::vector<size_t> nodes;
  std::vector<std::vector<Assignment>> loops;
  std::vector<LoopAccess> accesses;
  std::set<int32_t> touched;      // buffers
  std::set<int32_t> read_before;  // buffers that are read before the group writes them
  std::set<int32_t> local;        // buffers that only this group uses; set by find_locals()
};

class PointwiseFusion {
 public:
  explicit PointwiseFusion(Program& program) : program_(program) {}

  Matched run() {
    for (size_t n = 0; n < program_.nodes.size(); n++) {
      if (has_no_kernel(program_.nodes[n])) continue;
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
  // Views and allocations do nothing when the program runs.
  bool has_no_kernel(const Node& node) const { return is_view(program_, node) || kind_of(node) == OpKind::Empty; }

  // Adds the accesses of the assignment to the group. False, without an effect, if they conflict with the group's.
  bool add_accesses(const Assignment& each, size_t loop) {
    std::vector<LoopAccess> accesses;
    for (const auto part : each.cat_inputs) accesses.emplace_back(program_, part, false, true, loop);
    for (size_t i = 0; i < each.operands.size(); i++)
      if (const auto* id = std::get_if<ValueId>(&each.operands[i]))
        accesses.emplace_back(program_, *id, false, false, loop);
    accesses.emplace_back(program_, each.into, true, false, loop);
    for (const auto& access : accesses) {
      const auto conflicts = [&](const LoopAccess& other) { return access.conflicts_with(other); };
      if (std::any_of(accesses.begin(), accesses.end(), conflicts) ||
          std::any_of(group_.accesses.begin(), group_.accesses.end(), conflicts))
        return false;
    }
    for (const auto& access : accesses) {
      const bool was_written =
          std::any_of(group_.accesses.begin(), group_.accesses.end(),
                      [&](const LoopAccess& other) { return other.written && other.location == access.location; });
      if (!access.written && !was_written) group_.read_before.insert(access.location.buffer);
      group_.touched.insert(access.location.buffer);
    }
    group_.accesses.insert(group_.accesses.end(), accesses.begin(), accesses.end());
    return true;
  }

  void open(size_t n, std::vector<Assignment> assignments) {
    for (auto& each : assignments) {
      if (!add_accesses(each, group_.loops.size())) {
        group_ = {};
        return;
      }
      group_.loops.push_back({std::move(each)});
    }
    group_.nodes = {n};
  }

  bool join(size_t n, const Assignment& next) {
    if (group_.loops.size() != 1 || group_.loops[0].size() == kMaxOpsPerLoop) return false;
    auto& loop = group_.loops[0];
    if (!codegen::same_element_layout(program_[loop[0].into].type, program_[next.into].type)) return false;
    const auto is_cat = [](const Assignment& each) { return !each.cat_inputs.empty(); };
    if (is_cat(next) && std::any_of(loop.begin(), loop.end(), is_cat)) return false;
    if (!add_accesses(next, 0)) return false;
    loop.push_back(next);
    group_.nodes.push_back(n);
    return true;
  }

  // A group of one cat is not fused: LibTorch's cat is as fast.
  void close() {
    const bool cat_alone = group_.nodes.size() == 1 && !group_.loops[0][0].cat_inputs.empty();
    if (!group_.nodes.empty() && !cat_alone) groups_.push_back(std::move(group_));
    group_ = {};
  }

  // Finds the buffers that only one group uses.
  void find_locals() {
    constexpr int32_t kNoGroup = -1, kShared = -2;
    std::vector<int32_t> owner(static_cast<size_t>(program_.buffers), kNoGroup);
    const auto external = program_.external_buffers();
    for (size_t b = 0; b < owner.size(); b++)
      if (external[b]) owner[b] = kShared;
    for (const auto& output : program_.outputs)
      if (output.value != kNone) owner[static_cast<size_t>(program_.buffer_of(output.value))] = kShared;
    group_of_.assign(program_.nodes.size(), kShared);
    for (size_t g = 0; g < groups_.size(); g++)
      for (const auto n : groups_[g].nodes) group_of_[n] = static_cast<int32_t>(g);
    for (size_t n = 0; n < program_.nodes.size(); n++) {
      const auto& node = program_.nodes[n];
      if (has_no_kernel(node)) continue;
      const auto note = [&](ValueId id) {
        auto& by = owner[static_cast<size_t>(program_.buffer_of(id))];
        by = by == kNoGroup || by == group_of_[n] ? group_of_[n] : kShared;
      };
      node.each_read(note);
      node.each_result(note);
    }
    for (size_t g = 0; g < groups_.size(); g++)
      for (const auto buffer : groups_[g].touched)
        if (owner[static_cast<size_t>(buffer)] == static_cast<int32_t>(g) && !groups_[g].read_before.count(buffer))
          groups_[g].local.insert(buffer);
  }

  std::string name_of(const FusionGroup& group) const {
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
      if (named++ < kMaxOpsInName) name += "_" + op;
    return name + "_" + std::to_string(program_.kernels.size());
  }

  void rewrite() {
    std::set<int32_t> local;
    for (const auto& group : groups_) local.insert(group.local.begin(), group.local.end());
    ReplacedValues replaced(program_);
    std::vector<Node> kept;
    for (size_t n = 0; n < program_.nodes.size(); n++) {
      auto& node = program_.nodes[n];
      replaced.rewrite_reads(node);
      const auto g = group_of_[n];
      if (g < 0) {
        bool needed = !has_no_kernel(node);
        node.each_result([&](ValueId id) { needed |= local.count(program_.buffer_of(id)) == 0; });
        if (needed) kept.push_back(std::move(node));
        continue;
      }
      const auto& group = groups_[static_cast<size_t>(g)];
      if (n == group.nodes[0])
        for (const auto member : group.nodes) define_results(program_.nodes[member], local, replaced, kept);
      if (n != group.nodes.back()) continue;
      kept.push_back(kernel_of(group, node.module));
      replaced.rewrite_reads(kept.back());
    }
    replaced.rewrite_outputs(program_);
    program_.nodes = std::move(kept);
  }

  // Results of functional ops are allocated for the kernel to fill. Results of in-place ops are the written
  // argument.
  void define_results(const Node& node, const std::set<int32_t>& local, ReplacedValues& replaced,
                      std::vector<Node>& kept) const {
    const bool in_place = node.schema().is_mutable();
    node.each_result([&](ValueId id) {
      if (in_place)
        replaced.set(id, replaced(std::get<ValueId>(node.args[0])));
      else if (!local.count(program_.buffer_of(id)))
        kept.push_back(allocation_of(program_, id));
    });
  }

  // Groups with the same ops and sizes, as equal layers have them, share a kernel: the compiler's time does not grow
  // with the number of layers.
  Node kernel_of(const FusionGroup& group, const std::string& module) {
    const auto write = [&](const std::string& name) {
      return codegen::write_kernel(program_, name, group.loops,
                                   [&](int32_t buffer) { return group.local.count(buffer) > 0; });
    };
    auto source = write("kernel");
    const auto [name, is_new] = name_by_source_.try_emplace(source.text);
    if (is_new) {
      name->second = name_of(group);
      program_.kernels[name->second] = write(name->second).text;
    }
    return {find_op("tessera.cpp_kernel"), {source.outs, source.ins, c10::IValue(name->second)}, {}, module};
  }

  Program& program_;
  FusionGroup group_;  // the open one
  std::vector<FusionGroup> groups_;
  std::vector<int32_t> group_of_;  // by node
  std::map<std::string, std::string> name_by_source_;
};

}  // namespace

Matched fuse_pointwise(Program& program) { return PointwiseFusion(program).run(); }

}  // namespace tessera::compiler
