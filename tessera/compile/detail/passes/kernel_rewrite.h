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

  static ValueId value_of(const Arg& arg) {
    const auto* id = std::get_if<ValueId>(&arg);
    return id ? *id : kNone;
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
