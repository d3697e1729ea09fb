#include "tessera/compile/detail/ir/def_use.h"
#include "tessera/compile/detail/ir/dependencies.h"
#include "tessera/compile/detail/ir/op_table.h"
#include "tessera/compile/detail/passes/op_variants.h"
#include "tessera/compile/detail/passes/passes.h"
#include "tessera/compile/detail/replay/op_kernel.h"
#include "tessera/compile/detail/report/memory_curve.h"

// Makes pointwise ops in-place if their first operand is not used afterwards. Reduces peak memory.
//
//   %2: f32[8] = aten.tanh(%1)     ->     %2: f32[8] in %1 = aten.tanh_(%1!)
//
// An op without an in-place variant gets its operand as out= argument.
//
// Law: an op may write into an input that is dead after it. The operand covers a buffer of the program and has the type
// of the result. Other operands in that buffer have the same offset and type, so element i is read before it is
// written.
namespace tessera::compiler {
namespace {

class InPlaceOps {
 public:
  InPlaceOps(Program& program, int64_t smallest)
      : program_(program),
        smallest_(smallest),
        def_use_(program),
        alive_(lifetimes(program)),
        bytes_(program.buffer_bytes()),
        in_buffer_(values_by_buffer(program)) {}

  Matched run() {
    const auto before = memory_curve(program_).peak();
    Matched matched;
    for (size_t n = 0; n < program_.nodes.size(); n++) matched.times += rewrite(n, program_.nodes[n]);
    if (matched.times > 0) matched.note = c10::str("peak of ", before, " bytes, now ", memory_curve(program_).peak());
    return matched;
  }

 private:
  bool rewrite(size_t n, Node& node) {
    if (node.results.size() != 1 || !is_pure(node) || !is_pointwise(node.op)) return false;
    if (!std::holds_alternative<ValueId>(node.args[0]) || !std::holds_alternative<ValueId>(node.results[0]))
      return false;
    const auto x = std::get<ValueId>(node.args[0]), result = std::get<ValueId>(node.results[0]);
    if (x == kNone || result == kNone || !can_reuse(x, result, n)) return false;
    bool others_fit = true;
    node.each_read([&](ValueId id) {
      others_fit &= program_.buffer_of(id) != program_.buffer_of(x) ||
                    (program_[id].offset == 0 && program_[id].type == program_[x].type);
    });
    if (!others_fit) return false;
    if (const auto variant = in_place_variant(node.op)) {
      node.op = *variant;
    } else if (const auto out = out_overload(node.op, program_[x].type.device.type())) {
      node.op = *out;
      node.args.emplace_back(x);
    } else {
      return false;
    }
    const auto from = static_cast<size_t>(program_.buffer_of(result)), to = static_cast<size_t>(program_.buffer_of(x));
    for (const auto id : in_buffer_[from]) {
      program_.values[static_cast<size_t>(id)].buffer = static_cast<int32_t>(to);
      in_buffer_[to].push_back(id);
    }
    in_buffer_[from].clear();
    alive_[to].last = alive_[from].last;
    return true;
  }

  bool can_reuse(ValueId x, ValueId result, size_t n) const {
    const auto b = static_cast<size_t>(program_.buffer_of(x)), r = static_cast<size_t>(program_.buffer_of(result));
    return b != r && !def_use_.external[b] && !def_use_.has_output[b] && !def_use_.external[r] &&
           !def_use_.has_output[r] && program_[x].type == program_[result].type && program_[result].offset == 0 &&
           covers_buffer(program_, x, bytes_) && bytes_[b] >= smallest_ && alive_[b].last == static_cast<int32_t>(n);
  }

  Program& program_;
  const int64_t smallest_;  // bytes
  const DefUse def_use_;
  std::vector<Lifetime> alive_;
  const std::vector<int64_t> bytes_;
  std::vector<std::vector<ValueId>> in_buffer_;
};

}  // namespace

Matched in_place_ops(Program& program, const PassSettings& settings) {
  return InPlaceOps(program, settings.at("bytes")).run();
}

}  // namespace tessera::compiler
