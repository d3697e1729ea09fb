#include "tessera/compile/detail/ir/dependencies.h"
#include "tessera/compile/detail/passes/passes.h"

namespace tessera::compiler {
namespace {

class InPlace {
 public:
  explicit InPlace(Program& program)
      : program_(program),
        external_(program.external_buffers()),
        alive_(lifetimes(program)),
        bytes_(program.buffer_bytes()),
        put_out_(external_.size(), 0) {
    for (const auto& output : program.outputs)
      if (output.value != kNone) put_out_[static_cast<size_t>(program.buffer_of(output.value))] = 1;
  }

  // Is x all of a buffer that nobody touches after node n, but the collective that is under way?
  bool can_be_taken(ValueId x, ValueId result, size_t wait) const {
    const auto& value = program_[x];
    const auto b = static_cast<size_t>(value.buffer);
    return !external_[b] && !put_out_[b] && value.offset == 0 && value.type == program_[result].type &&
           value.type.is_contiguous() && bytes_[b] == value.type.bytes() &&
           alive_[b].last <= static_cast<int32_t>(wait);
  }
  // The buffer of x becomes that of the result.
  void take(ValueId x, ValueId result) {
    const auto from = program_.buffer_of(x), to = program_.buffer_of(result);
    for (auto& value : program_.values)
      if (value.buffer == from) value.buffer = to;
  }

 private:
  Program& program_;
  std::vector<char> external_;
  std::vector<Lifetime> alive_;
  std::vector<int64_t> bytes_;
  std::vector<char> put_out_;
};

// The last wait for one of the values, or the node itself: until there the collective uses its arguments.
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
  InPlace in_place(program);
  for (size_t n = 0; n < program.nodes.size(); n++) {
    auto& node = program.nodes[n];
    const auto name = node.name();
    if (name == "tessera.all_reduce") {
      const auto x = std::get<ValueId>(node.args[0]), result = std::get<ValueId>(node.results[0]);
      if (!in_place.can_be_taken(x, result, last_wait(program, n, {result}))) continue;
      in_place.take(x, result);
      node.op = find_op("tessera.all_reduce_");
      matched.times++;
    } else if (name == "tessera.all_reduce_coalesced") {
      const auto xs = std::get<ValueList>(node.args[0]), results = std::get<ValueList>(node.results[0]);
      const auto wait = last_wait(program, n, results);
      bool all = true;
      for (size_t i = 0; i < xs.size(); i++) all &= in_place.can_be_taken(xs[i], results[i], wait);
      if (!all) continue;
      for (size_t i = 0; i < xs.size(); i++) in_place.take(xs[i], results[i]);
      node.op = find_op("tessera.all_reduce_coalesced_");
      node.results.clear();  // whoever waits for a result waits for the argument
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
