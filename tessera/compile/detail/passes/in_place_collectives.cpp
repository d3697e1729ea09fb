#include "tessera/compile/detail/ir/dependencies.h"
#include "tessera/compile/detail/ir/op_table.h"
#include "tessera/compile/detail/passes/passes.h"

#include <unordered_set>

// Makes all-reduces in-place if their input is not used afterwards.
//
//   %2: f32[8] = tessera.all_reduce(%1, "sum", @dp)     ->     %2: f32[8] in %1 = tessera.all_reduce_(%1!, "sum", @dp)
//
// Law: an op may write into an input that is dead after it. The input covers a buffer of the program, is not an output,
// and has the type of the result. The wait is its last use, and the only one after the collective is posted: another
// collective in flight, or an op before the wait, may still read it.
namespace tessera::compiler {
namespace {

class InputReuse {
 public:
  explicit InputReuse(Program& program)
      : program_(program),
        external_(program.external_buffers()),
        used_(used_buffers(program)),
        bytes_(program.buffer_bytes()),
        is_output_(external_.size(), 0) {
    for (const auto& output : program.outputs)
      if (output.value != kNone) is_output_[static_cast<size_t>(program.buffer_of(output.value))] = 1;
  }

  // True if every x covers a buffer of its own that only waits for `results` use after node n.
  bool can_reuse(const ValueList& xs, const ValueList& results, size_t n) const {
    std::unordered_set<int32_t> reused;
    for (size_t i = 0; i < xs.size(); i++)
      if (!covers_temporary(xs[i], results[i]) || !reused.insert(program_.buffer_of(xs[i])).second) return false;
    for (size_t later = n + 1; later < used_.size(); later++) {
      if (waits_for(program_.nodes[later], results)) continue;
      for (const auto buffer : used_[later])
        if (reused.count(buffer)) return false;
    }
    return true;
  }
  // Merges the buffer of x into the buffer of the result.
  void merge_buffers(ValueId x, ValueId result) {
    const auto from = program_.buffer_of(x), to = program_.buffer_of(result);
    for (auto& value : program_.values)
      if (value.buffer == from) value.buffer = to;
  }

 private:
  bool covers_temporary(ValueId x, ValueId result) const {
    const auto& value = program_[x];
    const auto b = static_cast<size_t>(value.buffer);
    return !external_[b] && !is_output_[b] && value.offset == 0 && value.type == program_[result].type &&
           value.type.is_contiguous() && bytes_[b] == value.type.bytes();
  }
  bool waits_for(const Node& node, const ValueList& results) const {
    bool found = false;
    if (kind_of(node) == OpKind::Wait)
      node.each_read([&](ValueId id) {
        for (const auto result : results) found |= program_.buffer_of(id) == program_.buffer_of(result);
      });
    return found;
  }

  Program& program_;
  std::vector<char> external_;
  std::vector<std::vector<int32_t>> used_;  // by node
  std::vector<int64_t> bytes_;
  std::vector<char> is_output_;
};

}  // namespace

Matched in_place_collectives(Program& program) {
  Matched matched;
  InputReuse reuse(program);
  for (size_t n = 0; n < program.nodes.size(); n++) {
    auto& node = program.nodes[n];
    const auto name = node.name();
    if (name == "tessera.all_reduce") {
      const auto x = std::get<ValueId>(node.args[0]), result = std::get<ValueId>(node.results[0]);
      if (!reuse.can_reuse({x}, {result}, n)) continue;
      reuse.merge_buffers(x, result);
      node.op = find_op("tessera.all_reduce_");
      matched.times++;
    } else if (name == "tessera.all_reduce_coalesced") {
      const auto xs = std::get<ValueList>(node.args[0]), results = std::get<ValueList>(node.results[0]);
      if (!reuse.can_reuse(xs, results, n)) continue;
      for (size_t i = 0; i < xs.size(); i++) reuse.merge_buffers(xs[i], results[i]);
      node.op = find_op("tessera.all_reduce_coalesced_");
      node.results.clear();  // waits for a result become waits for the argument
      const auto argument_for = [&](ValueId id) {
        for (size_t i = 0; i < xs.size(); i++)
          if (id == results[i]) return xs[i];
        return id;
      };
      for (size_t later = n + 1; later < program.nodes.size(); later++)
        program.nodes[later].replace_reads(argument_for);
      for (auto& output : program.outputs)
        if (output.value != kNone) output.value = argument_for(output.value);
      matched.times++;
    }
  }
  return matched;
}

}  // namespace tessera::compiler
