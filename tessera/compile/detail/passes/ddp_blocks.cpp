#include "tessera/compile/detail/passes/ddp_blocks.h"

#include "tessera/compile/detail/ir/op_table.h"

namespace tessera::compiler {
namespace {

struct Uses {
  explicit Uses(const Program& program)
      : made_by(program.values.size(), -1), readers(program.values.size()), put_out(program.values.size(), 0) {
    for (size_t n = 0; n < program.nodes.size(); n++) {
      program.nodes[n].each_result([&](ValueId id) { made_by[static_cast<size_t>(id)] = static_cast<int64_t>(n); });
      program.nodes[n].each_read([&](ValueId id) { readers[static_cast<size_t>(id)].push_back(n); });
    }
    for (const auto& output : program.outputs)
      if (output.value != kNone) put_out[static_cast<size_t>(output.value)] = 1;
  }
  std::vector<int64_t> made_by;
  std::vector<std::vector<size_t>> readers;
  std::vector<char> put_out;
};

const double* number(const Arg& arg, double& into) {
  const auto* constant = std::get_if<c10::IValue>(&arg);
  if (!constant || !constant->isScalar()) return nullptr;
  into = constant->toScalar().toDouble();
  return &into;
}

// Does anything but the copy of its own mean write to a block's gradient before node `end`?
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
  const Uses uses(program);
  const auto only_reader = [&](ValueId id) -> int64_t {
    const auto& readers = uses.readers[static_cast<size_t>(id)];
    return readers.size() == 1 && !uses.put_out[static_cast<size_t>(id)] ? static_cast<int64_t>(readers[0]) : -1;
  };
  for (size_t n = 0; n < program.nodes.size(); n++) {
    const auto& reduce = program.nodes[n];
    if (reduce.name() != "tessera.all_reduce" || std::get<c10::IValue>(reduce.args[1]).toStringRef() != "sum") continue;
    CommBlock block{};
    block.reduce = n;
    block.divided = std::get<ValueId>(reduce.args[0]);
    block.reduced = std::get<ValueId>(reduce.results[0]);
    block.group = group_of(reduce);
    const auto divide = uses.made_by[static_cast<size_t>(block.divided)];
    if (divide < 0 || only_reader(block.divided) != static_cast<int64_t>(n)) continue;
    const auto& division = program.nodes[static_cast<size_t>(divide)];
    const auto by = division.name();
    if ((by != "aten.div.Tensor" && by != "aten.div.Scalar") || !number(division.args[1], block.divisor)) continue;
    block.divide = static_cast<size_t>(divide);
    block.gradient = std::get<ValueId>(division.args[0]);
    const auto wait = only_reader(block.reduced);
    if (wait < 0 || kind_of(program.nodes[static_cast<size_t>(wait)]) != OpKind::Wait) continue;
    block.wait = static_cast<size_t>(wait);
    block.waited = std::get<ValueId>(program.nodes[block.wait].results[0]);
    // Its one reader: what is put out, or a copy.
    const bool out =
        uses.put_out[static_cast<size_t>(block.waited)] && uses.readers[static_cast<size_t>(block.waited)].empty();
    const auto copy = only_reader(block.waited);
    if (!out && (copy < 0 || program.nodes[static_cast<size_t>(copy)].name() != "aten.copy_")) continue;
    block.copied_to = out ? -1 : program.buffer_of(std::get<ValueId>(program.nodes[static_cast<size_t>(copy)].args[0]));
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
