#include "tessera/compile/detail/passes/fuse_ddp.h"
#include "tessera/compile/detail/passes/passes.h"

namespace tessera::compiler {

// flatten each gradient, cat, one div, one all_reduce, one wait, split, reshape.
Matched fuse_ddp_with_concat_op(Program& program) {
  return fuse_ddp(program, [](Rewrite& to, const std::vector<CommBlock>& bucket) {
    auto& program = to.program;
    const auto dtype = program[bucket[0].gradient].type.dtype;
    ValueList flat;
    std::vector<int64_t> sizes;
    int64_t total = 0;
    for (const auto& block : bucket) {
      const auto type = program[block.gradient].type;
      sizes.push_back(type.numel());
      total += sizes.back();
      const auto flattened = Type::contiguous(dtype, {type.numel()}, type.device);
      const auto value = type.is_contiguous()
                             ? program.add_in(block.gradient, flattened, program[block.gradient].offset)
                             : program.add(flattened);
      to.add("aten.flatten.using_ints", {block.gradient, c10::IValue(0), c10::IValue(-1)}, {value});
      flat.push_back(value);
    }
    const auto whole = Type::contiguous(dtype, {total}, program[bucket[0].gradient].type.device);
    const auto joined = program.add(whole), divided = program.add(whole), reduced = program.add(whole);
    to.add("aten.cat", {flat, c10::IValue(0)}, {joined});
    to.add("aten.div.Tensor", {joined, c10::IValue(bucket[0].divisor)}, {divided});
    to.add("tessera.all_reduce", {divided, c10::IValue("sum"), GroupName{bucket[0].group}}, {reduced});
    const auto waited = program.add_in(reduced, whole, 0);
    to.add_wait("tessera.wait", {reduced, GroupName{bucket[0].group}}, {waited});
    ValueList pieces;
    int64_t offset = 0;
    for (const auto size : sizes) {
      pieces.push_back(program.add_in(reduced, Type::contiguous(dtype, {size}, whole.device), offset));
      offset += size;
    }
    to.add_wait("aten.split_with_sizes", {waited, c10::IValue(sizes), c10::IValue(0)}, {pieces});
    std::vector<ValueId> instead;
    offset = 0;
    for (size_t i = 0; i < bucket.size(); i++) {
      const auto shape = program[bucket[i].gradient].type;
      const auto value = program.add_in(reduced, Type::contiguous(dtype, shape.sizes, shape.device), offset);
      to.add_wait("aten.view", {pieces[i], c10::IValue(shape.sizes)}, {value});
      instead.push_back(value);
      offset += sizes[i];
    }
    return instead;
  });
}

}  // namespace tessera::compiler
