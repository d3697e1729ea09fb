#include "tessera/compile/detail/codegen/small_function.h"
#include "tessera/compile/detail/ir/def_use.h"
#include "tessera/compile/detail/ir/op_table.h"
#include "tessera/compile/detail/passes/passes.h"

#include <set>

// Fuses consecutive small ops (codegen/small_function.h) into one generated function: matrix products, pointwise ops,
// sums and updates by Adam. Views between them stay.
//
//   %4: f32[8, 16] = aten.addmm(%1, %0, %3, 1, 1)        %4, %5: f32[8, 16] = aten.empty_strided(...)
//   %5: f32[8, 16] = aten.relu(%4)                  ->   tessera.cpp_kernel([%4!, %5!], [%0, %1, %3],
//   "cpp_small_..._0")
//
// Law: the function runs the ops in program order on the same memory. Its sums are not in LibTorch's order, so bits
// differ from eager mode.
namespace tessera::compiler {
namespace {

class SmallOpFusion {
 public:
  explicit SmallOpFusion(Program& program) : program_(program), writer_(program), replaced_(program) {}

  Matched run() {
    std::vector<Node> nodes;
    std::swap(nodes, program_.nodes);
    for (auto& node : nodes) {
      const bool needs_kernel = !is_view(program_, node) && kind_of(node) != OpKind::Empty;
      const bool joins = needs_kernel && writer_.add(node);
      if (needs_kernel && !joins) close();
      group_.push_back({std::move(node), joins});
      if (needs_kernel && !joins) close();
    }
    close();
    replaced_.rewrite_outputs(program_);
    program_.nodes = std::move(kept_);
    return matched_;
  }

 private:
  struct GroupNode {
    Node node;
    bool fused;  // false: a view, or a node that is not fused
  };

  void keep(Node node) {
    replaced_.rewrite_reads(node);
    kept_.push_back(std::move(node));
  }

  // The results of a functional op are allocated for the function to fill. That of an in-place op is the written
  // argument.
  void define_results(const Node& node) {
    const bool in_place = node.schema().is_mutable();
    node.each_result([&](ValueId id) {
      if (in_place)
        replaced_.set(id, replaced_(std::get<ValueId>(node.args[0])));
      else
        kept_.push_back(allocation_of(program_, id));
    });
  }

  static std::string op_in_name(const Node& node) {
    const auto name = node.name();
    auto op = name.substr(name.find('.') + 1);
    op = op.substr(0, op.find('.'));
    while (op.back() == '_') op.pop_back();
    return op;
  }

  // Pointwise ops alone are left to fuse_pointwise, which keeps LibTorch's bits.
  void close() {
    const bool fuses = writer_.changes_rounding();
    std::set<std::string> ops;
    for (auto& [node, fused] : group_) {
      if (!fuses || !fused) {
        keep(std::move(node));
        continue;
      }
      define_results(node);
      module_ = node.module;
      ops.insert(op_in_name(node));
    }
    if (fuses) add_function(ops);
    group_.clear();
    writer_ = codegen::SmallFunctionWriter(program_);
  }

  void add_function(const std::set<std::string>& ops) {
    constexpr size_t kMaxOpsInName = 10;
    std::string name = "cpp_small";
    size_t named = 0;
    for (const auto& op : ops)
      if (named++ < kMaxOpsInName) name += "_" + op;
    name += "_" + std::to_string(program_.kernels.size());
    auto source = writer_.finish(name);
    program_.kernels[name] = std::move(source.text);
    std::vector<Arg> args = {source.outs, source.ins, c10::IValue(name)};
    const auto& numbers = writer_.numbers();
    for (size_t i = 0; !numbers.empty() && i < codegen::SmallFunctionWriter::kMaxNumbers; i++)
      args.push_back(i < numbers.size() ? Arg(numbers[i]) : Arg(c10::IValue(0.0)));
    keep(
        {find_op(numbers.empty() ? "tessera.cpp_kernel" : "tessera.cpp_kernel.numbers"), std::move(args), {}, module_});
    matched_.times++;
  }

  Program& program_;
  codegen::SmallFunctionWriter writer_;
  ReplacedValues replaced_;
  std::vector<GroupNode> group_;  // the open one, with the views between its nodes
  std::vector<Node> kept_;
  std::string module_;
  Matched matched_;
};

}  // namespace

Matched fuse_small_ops(Program& program) { return SmallOpFusion(program).run(); }

}  // namespace tessera::compiler
