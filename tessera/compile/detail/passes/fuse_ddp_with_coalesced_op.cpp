#include "tessera/compile/detail/passes/fuse_ddp.h"
#include "tessera/compile/detail/passes/passes.h"

namespace tessera::compiler {

// One foreach div, one coalesced all_reduce, a wait for each.
Matched fuse_ddp_with_coalesced_op(Program& program) {
  return fuse_ddp(program, [](Rewrite& to, const std::vector<CommBlock>& bucket) {
    auto& program = to.program;
    ValueList gradients, divided, reduced;
    for (const auto& block : bucket) {
      const auto type = program[block.divided].type;
      gradients.push_back(block.gradient);
      divided.push_back(program.add(type));
      reduced.push_back(program.add(type));
    }
    to.add("aten._foreach_div.Scalar", {gradients, c10::IValue(bucket[0].divisor)}, {divided});
    to.add("tessera.all_reduce_coalesced", {divided, c10::IValue("sum"), GroupName{bucket[0].group}}, {reduced});
    std::vector<ValueId> instead;
    for (const auto value : reduced) {
      instead.push_back(program.add_in(value, program[value].type, 0));
      to.add_wait("tessera.wait", {value, GroupName{bucket[0].group}}, {instead.back()});
    }
    return instead;
  });
}

}  // namespace tessera::compiler
