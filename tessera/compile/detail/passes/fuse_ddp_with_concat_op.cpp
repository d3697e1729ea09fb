#include "tessera/compile/detail/passes/fuse_ddp.h"
#include "tessera/compile/detail/passes/passes.h"

// Gradient bucketing of DDP with a concatenated buffer (PyTorch Inductor: fuse_ddp_with_concat_op). Per bucket:
//
//   div, all_reduce, wait for each gradient     ->     flatten each, cat, one div, one all_reduce, one wait,
//                                                      split, view each
//
// Law: cat(all_reduce(a), all_reduce(b)) = all_reduce(cat(a, b)).
namespace tessera::compiler {

Matched fuse_ddp_with_concat_op(Program& program) {
  return fuse_ddp(program, [](BucketRewrite& to, const std::vector<CommBlock>& bucket) {
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
    const auto flat_type = Type::contiguous(dtype, {total}, program[bucket[0].gradient].type.device);
    const auto joined = program.add(flat_type), divided = program.add(flat_type), reduced = program.add(flat_type);
    to.add("aten.cat", {flat, c10::IValue(0)}, {joined});
    to.add("aten.div.Tensor", {joined, c10::IValue(bucket[0].divisor)}, {divided});
    to.add("tessera.all_reduce", {divided, c10::IValue("sum"), GroupName{bucket[0].group}}, {reduced});
    const auto waited = program.add_in(reduced, flat_type, 0);
    to.add_wait("tessera.wait", {reduced, GroupName{bucket[0].group}}, {waited});
    ValueList parts;
    int64_t offset = 0;
    for (const auto size : sizes) {
      parts.push_back(program.add_in(reduced, Type::contiguous(dtype, {size}, flat_type.device), offset));
      offset += size;
    }
    to.add_wait("aten.split_with_sizes", {waited, c10::IValue(sizes), c10::IValue(0)}, {parts});
    std::vector<ValueId> gradients;
    offset = 0;
    for (size_t i = 0; i < bucket.size(); i++) {
      const auto shape = program[bucket[i].gradient].type;
      const auto value = program.add_in(reduced, Type::contiguous(dtype, shape.sizes, shape.device), offset);
      to.add_wait("aten.view", {parts[i], c10::IValue(shape.sizes)}, {value});
      gradients.push_back(value);
      offset += sizes[i];
    }
    return gradients;
  });
}

}  // namespace tessera::compiler
