#include "tessera/compile/detail/passes/fuse_ddp.h"
#include "tessera/compile/detail/passes/passes.h"

// Gradient bucketing of DDP with a coalesced all-reduce (PyTorch Inductor: fuse_ddp_with_coalesced_op). Per bucket:
//
//   div, all_reduce, wait for each gradient   ->   one _foreach_div, one all_reduce_coalesced, one wait per gradient
//
// Law: all-reduces of one group and reduce op can be one coalesced all-reduce.
namespace tessera::compiler {

Matched fuse_ddp_with_coalesced_op(Program& program) {
  return fuse_ddp(program, [](BucketRewrite& to, const std::vector<CommBlock>& bucket) {
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
    std::vector<ValueId> waited;
    for (const auto value : reduced) {
      waited.push_back(program.add_in(value, program[value].type, 0));
      to.add_wait("tessera.wait", {value, GroupName{bucket[0].group}}, {waited.back()});
    }
    return waited;
  });
}

}  // namespace tessera::compiler
