#pragma once
#include "tessera/compile/detail/ir/def_use.h"
#include "tessera/compile/detail/ir/op_table.h"

#include <optional>
#include <vector>

namespace tessera::compiler {

// What the passes that put kernels of Tessera into a program share: a pass fills `kernels_` and `removed_`, by node,
// then calls rewrite(). `op` calls a kernel by name: "tessera.cuda_kernel" or "tessera.cpu_kernel".
class KernelRewrite {
 public:
  KernelRewrite(Program& program, const char* op)
      : program_(program),
        op_(op),
        def_use_(program),
        values_(values_by_buffer(program)),
        replaced_(program),
        removed_(program.nodes.size(), 0),
        kernels_(program.nodes.size()) {}

 protected:
  struct KernelNode {
    ValueList outs, allocated, ins;  // `allocated`: the outputs that are made before it
    std::vector<double> numbers;
    const char* name;
  };

  // The in-place sum that alone uses `dx`, the gradient of the input of node n, as its second term. `may_add(into,
  // sum)`: can n compute the sum instead?
  template <class MayAdd>
  std::optional<size_t> sum_after(size_t n, ValueId dx, const MayAdd& may_add) const {
    const auto by = def_use_.only_user(dx);
    if (by < 0 || values_[static_cast<size_t>(program_.buffer_of(dx))].size() != 1) return {};
    const auto at = static_cast<size_t>(by);
    const auto& add = program_.nodes[at];
    if (add.name() != "aten.add_.Tensor" || value_of(add.args[1]) != dx || !is_one(add.args[2])) return {};
    const auto into = value_of(add.args[0]);
    const bool is_defined = def_use_.def_node[static_cast<size_t>(into)] < static_cast<int32_t>(n);
    return is_defined && may_add(into, at) ? std::optional(at) : std::nullopt;
  }
  // The backward of a norm, with the sum that follows it if there is one. `weight` is its argument; statistics come
  // before.
  void set_norm_backward(size_t n, size_t weight, std::optional<size_t> sum, const char* alone, const char* adds) {
    const auto& node = program_.nodes[n];
    ValueList ins = {value_of(node.args[0]), value_of(node.args[1])}, outs;
    for (size_t i = 3; i <= weight; i++) ins.push_back(value_of(node.args[i]));
    for (const auto& result : node.results) outs.push_back(value_of(result));
    kernels_[n] = {outs, outs, ins, {}, alone};
    if (!sum) return;
    const auto& add = program_.nodes[*sum];
    auto& kernel = *kernels_[n];
    kernel.name = adds;
    kernel.outs[0] = value_of(add.args[0]);
    kernel.allocated.erase(kernel.allocated.begin());
    removed_[*sum] = 1;
    replaced_.set(value_of(add.results[0]), replaced_(kernel.outs[0]));
  }

  void rewrite() {
    std::vector<Node> kept;
    for (size_t n = 0; n < program_.nodes.size(); n++) {
      auto& node = program_.nodes[n];
      if (removed_[n]) continue;
      if (const auto& kernel = kernels_[n]) {
        for (const auto id : kernel->allocated) kept.push_back(allocation_of(program_, id));
        kept.push_back({find_op(op_),
                        {kernel->outs, kernel->ins, c10::IValue(kernel->numbers), c10::IValue(kernel->name)},
                        {},
                        node.module});
      } else {
        kept.push_back(std::move(node));
      }
      replaced_.rewrite_reads(kept.back());
    }
    replaced_.rewrite_outputs(program_);
    program_.nodes = std::move(kept);
  }

  Program& program_;
  const char* op_;
  const DefUse def_use_;
  const std::vector<std::vector<ValueId>> values_;  // by buffer
  ReplacedValues replaced_;
  std::vector<char> removed_;                       // by node
  std::vector<std::optional<KernelNode>> kernels_;  // by node
};

}  // namespace tessera::compiler
