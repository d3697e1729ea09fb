#include "tessera/compile/detail/ir/def_use.h"
#include "tessera/compile/detail/ir/op_table.h"
#include "tessera/compile/detail/passes/passes.h"
#include "tessera/compile/detail/replay/boxed_arguments.h"
#include "tessera/tracing/op_mode.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/core/stack.h>

#include <algorithm>

// Constant folding: ops whose arguments are all constants run at compile time, and the program stores the result.
//
//   %1: f32[3] = aten.arange(3.0, 6, none, device("cpu"), false)      input %1: f32[3] constant "0" = [0.0, 2.0, 4.0]
//   %2: f32[3] = aten.mul.Tensor(%1, 2)                            ->
//
// Law: a pure op on constants gives the same result in every run. Not folded: results that are written to later, that
// are returned (the caller may write to them), that are random, or that are larger than the setting `bytes`.
namespace tessera::compiler {
namespace {

class ConstantFolder {
 public:
  ConstantFolder(Program& program, int64_t max_bytes)
      : program_(program), max_bytes_(max_bytes), def_use_(program), known_(program.values.size()) {}

  Matched run() {
    for (const auto& input : program_.inputs)
      if (input.constant.defined()) known_[static_cast<size_t>(input.value)] = input.constant;
    folded_.assign(program_.nodes.size(), 0);
    Matched matched;
    for (size_t n = 0; n < program_.nodes.size(); n++) {
      const auto& node = program_.nodes[n];
      if (!can_be_folded(node) || !compute(node) || is_view(program_, node)) continue;
      folded_[n] = 1;
      matched.times++;
    }
    int64_t bytes = 0;
    for (const auto id : needed()) {
      const auto& tensor = known_[static_cast<size_t>(id)];
      bytes += static_cast<int64_t>(tensor.nbytes());
      program_.inputs.push_back({id, Role::Constant, c10::str("folded ", program_.inputs.size()), tensor});
    }
    size_t n = 0;
    std::erase_if(program_.nodes, [&](const Node&) { return folded_[n++] != 0; });
    if (matched.times > 0) matched.note = c10::str("the program stores ", bytes, " bytes of constants");
    return matched;
  }

 private:
  bool can_be_folded(const Node& node) const {
    if (!is_pure(node) || kind_of(node) != OpKind::Plain) return false;
    bool fits = true, any = false;
    for (const auto& arg : node.args)
      fits &= !std::holds_alternative<RuntimeScalar>(arg) && !std::holds_alternative<GroupName>(arg);
    node.each_read([&](ValueId id) { fits &= known_[static_cast<size_t>(id)].defined(); });
    const bool view = is_view(program_, node);
    node.each_result([&](ValueId id) {
      const auto b = static_cast<size_t>(program_.buffer_of(id));
      any = true;
      fits &= def_use_.writes[b] == 0 && (view || (!def_use_.has_output[b] && !def_use_.external[b]));
      fits &= view || program_[id].type.bytes() <= max_bytes_;
    });
    return fits && any;
  }

  // Runs the node. False, without an effect, if a result's type or offset is not the one in the program.
  bool compute(const Node& node) {
    const OpModesOff modes_off;
    const at::AutoDispatchBelowADInplaceOrView below;
    const at::NoGradGuard no_grad;
    torch::jit::Stack stack;
    for (size_t i = 0; i < node.args.size(); i++)
      stack.push_back(boxed(program_, node.args[i], node.schema().arguments()[i], known_));
    node.op.callBoxed(stack);
    std::vector<std::pair<ValueId, at::Tensor>> results;
    for (size_t i = 0; i < node.results.size(); i++) {
      if (const auto* id = std::get_if<ValueId>(&node.results[i])) {
        if (*id != kNone) results.emplace_back(*id, stack[i].toTensor());
      } else if (const auto* list = std::get_if<ValueList>(&node.results[i])) {
        const auto tensors = stack[i].toTensorVector();
        for (size_t k = 0; k < list->size(); k++)
          if ((*list)[k] != kNone) results.emplace_back((*list)[k], tensors[k]);
      }
    }
    const bool as_expected = std::all_of(results.begin(), results.end(), [&](const auto& each) {
      const auto& [id, tensor] = each;
      return Type::of(tensor) == program_[id].type && tensor.storage_offset() == program_[id].offset;
    });
    if (!as_expected) return false;
    for (auto& [id, tensor] : results) known_[static_cast<size_t>(id)] = std::move(tensor);
    return true;
  }

  // Folded values that the remaining nodes read.
  std::vector<ValueId> needed() const {
    std::vector<ValueId> list;
    std::vector<char> listed(known_.size(), 0);
    for (size_t n = 0; n < program_.nodes.size(); n++) {
      if (folded_[n]) continue;
      program_.nodes[n].each_read([&](ValueId id) {
        const auto by = def_use_.def_node[static_cast<size_t>(id)];
        if (by < 0 || !folded_[static_cast<size_t>(by)] || std::exchange(listed[static_cast<size_t>(id)], 1)) return;
        list.push_back(id);
      });
    }
    return list;
  }

  Program& program_;
  const int64_t max_bytes_;
  const DefUse def_use_;
  Tensors known_;             // by value: constants
  std::vector<char> folded_;  // by node
};

}  // namespace

Matched constant_folding(Program& program, const PassSettings& settings) {
  return ConstantFolder(program, settings.at("bytes")).run();
}

}  // namespace tessera::compiler
