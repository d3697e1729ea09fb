#include "tessera/compile/detail/ir/dependencies.h"
#include "tessera/compile/detail/passes/passes.h"

// Makes all-reduces in-place if their input is not used afterwards.
//
//   %2: f32[8] = tessera.all_reduce(%1, "sum", @dp)     ->     %2: f32[8] in %1 = tessera.all_reduce_(%1!, "sum", @dp)
//
// Law: an op may write into an input that is dead after it. The input covers a buffer of the program, is not an output,
// has the type of the result, and has no use after the wait.
namespace tessera::compiler {
namespace {

class InputReuse {
 public:
  explicit InputReuse(Program& program)
      : program_(program),
        external_(program.external_buffers()),
        alive_(lifetimes(program)),
        bytes_(program.buffer_bytes()),
        is_output_(external_.size(), 0) {
    for (const auto& output : program.outputs)
      if (output.value != kNone) is_output_[static_cast<size_t>(program.buffer_of(output.value))] = 1;
  }

  // True if x covers a buffer that nothing uses after the wait of the collective.
  bool can_reuse(ValueId x, ValueId result, size_t wait) const {
    const auto& value = program_[x];
    const auto b = static_cast<size_t>(value.buffer);
    return !external_[b] && !is_output_[b] && value.offset == 0 && value.type == program_[result].type &&
           value.type.is_contiguous() && bytes_[b] == value.type.bytes() &&
           alive_[b].last <= static_cast<int32_t>(wait);
  }
  // Merges the buffer of x into the buffer of the result.
  void merge_buffers(ValueId x, ValueId result) {
    const auto from = program_.buffer_of(x), to = program_.buffer_of(result);
    for (auto& value : program_.values)
      if (value.buffer == from) value.buffer = to;
  }

 private:
  Program& program_;
  std::vector<char> external_;
  std::vector<Lifetime> alive_;
  std::vector<int64_t> bytes_;
  std::vector<char> is_output_;
};

// The last wait for one of the results; n if nothing waits. Until then the collective uses its arguments.
size_t last_wait(const Program& program, size_t n, const ValueList& results) {
  size_t last = n;
  for (size_t w = n + 1; w < program.nodes.size(); w++)
    if (program.nodes[w].name() == "tessera.wait")
      program.nodes[w].each_read([&](ValueId id) {
        for (const auto result : results)
          if (program.buffer_of(id) == program.buffer_of(result)) last = w;
      });
  return last;
}

}  // namespace

Matched in_place_collectives(Program& program) {
  Matched matched;
  InputReuse reuse(program);
  for (size_t n = 0; n < program.nodes.size(); n++) {
    auto& node = program.nodes[n];
    const auto name = node.name();
    if (name == "tessera.all_reduce") {
      const auto x = std::get<ValueId>(node.args[0]), result = std::get<ValueId>(node.results[0]);
      if (!reuse.can_reuse(x, result, last_wait(program, n, {result}))) continue;
      reuse.merge_buffers(x, result);
      node.op = find_op("tessera.all_reduce_");
      matched.times++;
    } else if (name == "tessera.all_reduce_coalesced") {
      const auto xs = std::get<ValueList>(node.args[0]), results = std::get<ValueList>(node.results[0]);
      const auto wait = last_wait(program, n, results);
      bool all = true;
      for (size_t i = 0; i < xs.size(); i++) all &= reuse.can_reuse(xs[i], results[i], wait);
      if (!all) continue;
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
