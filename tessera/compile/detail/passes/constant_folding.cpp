#include "tessera/tracing/op_mode.h"
#include "tessera/compile/detail/ir/op_table.h"
#include "tessera/compile/detail/ir/def_use.h"
#include "tessera/compile/detail/passes/passes.h"
#include "tessera/compile/detail/replay/boxing.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/core/stack.h>

#include <algorithm>

// What depends on nothing is computed here, and the program carries the tensor:
//
//   %1: f32[3] = aten.arange(3.0, 6, none, device("cpu"), false)      input %1: f32[3] constant "0" = [0.0, 2.0, 4.0]
//   %2: f32[3] = aten.mul.Tensor(%1, 2)                            ->
//
// Not what is written to later, is returned (who gets it may write to it), is drawn, or is larger than `bytes`.
namespace tessera::compiler {
namespace {

class Folding {
 public:
  Folding(Program& program, int64_t most)
      : program_(program), most_(most), uses_(program), known_(program.values.size()) {}

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
    if (matched.times > 0) matched.note = c10::str("the program carries ", bytes, " bytes");
    return matched;
  }

 private:
  bool can_be_folded(const Node& node) const {
    if (!is_pure(node) || kind_of(node) != OpKind::Plain) return false;
    bool fits = true, any = false;
    for (const auto& arg : node.args)
      fits &= !std::holds_alternative<Live>(arg) && !std::holds_alternative<GroupName>(arg);
    node.each_read([&](ValueId id) { fits &= known_[static_cast<size_t>(id)].defined(); });
    const bool view = is_view(program_, node);
    node.each_result([&](ValueId id) {
      const auto b = static_cast<size_t>(program_.buffer_of(id));
      any = true;
      fits &= uses_.writes[b] == 0 && (view || (!uses_.seen[b] && !uses_.external[b]));
      fits &= view || program_[id].type.bytes() <= most_;
    });
    return fits && any;
  }

  // False, and nothing is known: the op gives something else than the program says.
  bool compute(const Node& node) {
    const OpModesOff only_this;
    const at::AutoDispatchBelowADInplaceOrView below;
    const at::NoGradGuard no_grad;
    torch::jit::Stack stack;
    for (size_t i = 0; i < node.args.size(); i++)
      stack.push_back(boxed(program_, node.args[i], node.schema().arguments()[i], known_));
    node.op.callBoxed(stack);
    std::vector<std::pair<ValueId, at::Tensor>> made;
    for (size_t i = 0; i < node.results.size(); i++) {
      if (const auto* id = std::get_if<ValueId>(&node.results[i])) {
        if (*id != kNone) made.emplace_back(*id, stack[i].toTensor());
      } else if (const auto* list = std::get_if<ValueList>(&node.results[i])) {
        const auto tensors = stack[i].toTensorVector();
        for (size_t k = 0; k < list->size(); k++)
          if ((*list)[k] != kNone) made.emplace_back((*list)[k], tensors[k]);
      }
    }
    const bool as_said = std::all_of(made.begin(), made.end(), [&](const auto& each) {
      const auto& [id, tensor] = each;
      return Type::of(tensor) == program_[id].type && tensor.storage_offset() == program_[id].offset;
    });
    if (!as_said) return false;
    for (auto& [id, tensor] : made) known_[static_cast<size_t>(id)] = std::move(tensor);
    return true;
  }

  // Folded values that what is left of the program reads.
  std::vector<ValueId> needed() const {
    std::vector<ValueId> list;
    std::vector<char> taken(known_.size(), 0);
    for (size_t n = 0; n < program_.nodes.size(); n++) {
      if (folded_[n]) continue;
      program_.nodes[n].each_read([&](ValueId id) {
        const auto by = uses_.made_by[static_cast<size_t>(id)];
        if (by < 0 || !folded_[static_cast<size_t>(by)] || std::exchange(taken[static_cast<size_t>(id)], 1)) return;
        list.push_back(id);
      });
    }
    return list;
  }

  Program& program_;
  const int64_t most_;
  const Uses uses_;
  Tensors known_;             // by value
  std::vector<char> folded_;  // by node
};

}  // namespace

Matched constant_folding(Program& program, const PassSettings& settings) {
  return Folding(program, settings.at("bytes")).run();
}

}  // namespace tessera::compiler
