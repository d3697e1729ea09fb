#include "tessera/compile/detail/passes/ddp_blocks.h"

#include "tessera/compile/detail/ir/def_use.h"
#include "tessera/compile/detail/ir/op_table.h"

namespace tessera::compiler {
namespace {

bool read_constant_scalar(const Arg& arg, double& into) {
  const auto* constant = constant_or_null(arg);
  if (!constant || !constant->isScalar()) return false;
  into = constant->toScalar().toDouble();
  return true;
}

// True if an op other than the copy of the block's own result writes to its gradient before node `end`.
bool written_between(const Program& program, const CommBlock& block, size_t end) {
  bool written = false;
  for (size_t n = block.divide + 1; n < end; n++) {
    const auto& node = program.nodes[n];
    if (node.name() == "aten.copy_" && same(node.args[1], block.waited)) continue;
    node.each_write([&](ValueId id) { written |= program.buffer_of(id) == program.buffer_of(block.gradient); });
  }
  return written;
}

}  // namespace

std::vector<CommBlock> find_comm_blocks(const Program& program) {
  std::vector<CommBlock> blocks;
  const DefUse def_use(program);
  for (size_t n = 0; n < program.nodes.size(); n++) {
    const auto& reduce = program.nodes[n];
    if (reduce.name() != "tessera.all_reduce" || std::get<c10::IValue>(reduce.args[1]).toStringRef() != "sum") continue;
    CommBlock block{};
    block.reduce = n;
    block.divided = std::get<ValueId>(reduce.args[0]);
    block.reduced = std::get<ValueId>(reduce.results[0]);
    block.group = group_of(reduce);
    const auto divide = def_use.def_node[static_cast<size_t>(block.divided)];
    if (divide < 0 || def_use.only_user(block.divided) != static_cast<int32_t>(n)) continue;
    const auto& division = program.nodes[static_cast<size_t>(divide)];
    const auto by = division.name();
    if ((by != "aten.div.Tensor" && by != "aten.div.Scalar") || !read_constant_scalar(division.args[1], block.divisor))
      continue;
    block.divide = static_cast<size_t>(divide);
    block.gradient = std::get<ValueId>(division.args[0]);
    const auto wait = def_use.only_user(block.reduced);
    if (wait < 0 || kind_of(program.nodes[static_cast<size_t>(wait)]) != OpKind::Wait) continue;
    block.wait = static_cast<size_t>(wait);
    block.waited = std::get<ValueId>(program.nodes[block.wait].results[0]);
    // Its only use: an output, or a copy.
    const auto waited = static_cast<size_t>(block.waited);
    const bool output = def_use.is_output[waited] && def_use.users[waited].empty();
    const auto copy = def_use.only_user(block.waited);
    if (!output && (copy < 0 || program.nodes[static_cast<size_t>(copy)].name() != "aten.copy_")) continue;
    block.copied_to =
        output ? -1 : program.buffer_of(std::get<ValueId>(program.nodes[static_cast<size_t>(copy)].args[0]));
    block.bytes = program[block.divided].type.bytes();
    blocks.push_back(block);
  }
  return blocks;
}

std::vector<std::vector<CommBlock>> bucket_blocks(const Program& program, const std::vector<CommBlock>& blocks,
                                                  int64_t cap) {
  std::vector<std::vector<CommBlock>> buckets;
  int64_t size = 0;
  bool open = false;
  for (const auto& block : blocks) {
    if (open) {
      const auto& other = buckets.back().back();
      open = other.group == block.group && other.divisor == block.divisor &&
             program[other.divided].type.dtype == program[block.divided].type.dtype;
      for (const auto& each : buckets.back())
        open &= each.copied_to != program.buffer_of(block.gradient) && !written_between(program, each, block.divide);
    }
    if (!open) {
      buckets.emplace_back();
      size = 0;
    }
    buckets.back().push_back(block);
    size += block.bytes;
    open = size < (buckets.size() == 1 ? kFirstBucketBytes : cap);
  }
  return buckets;
}

}  // namespace tessera::compiler
