#include "tessera/compile/detail/ir/collective.h"

#include "tessera/compile/detail/ir/op_table.h"
#include "tessera/compile/detail/ir/schema_match.h"

#include <algorithm>
#include <limits>

namespace tessera::compiler {
namespace {

constexpr auto kMost = std::numeric_limits<int64_t>::max();
// For factors and terms that are not negative: at most kMost.
int64_t product(int64_t a, int64_t b) { return __builtin_mul_overflow(a, b, &a) ? kMost : a; }
int64_t sum(int64_t a, int64_t b) { return __builtin_add_overflow(a, b, &a) ? kMost : a; }

int64_t arg_bytes(const Program& program, const Arg& arg) {
  if (const auto* id = std::get_if<ValueId>(&arg)) return *id == kNone ? 0 : program[*id].type.bytes();
  int64_t bytes = 0;
  if (const auto* list = std::get_if<ValueList>(&arg))
    for (const auto id : *list) bytes = sum(bytes, id == kNone ? 0 : program[id].type.bytes());
  return bytes;
}

int64_t larger_side_bytes(const Program& program, const Node& node) {
  int64_t input = 0, output = 0;
  for (const auto& arg : node.args) input = std::max(input, arg_bytes(program, arg));
  for (const auto& result : node.results) output = std::max(output, arg_bytes(program, result));
  return std::max(input, output);
}

std::vector<int64_t> integers(const Arg& arg) {
  const auto& constant = std::get<c10::IValue>(arg);
  std::vector<int64_t> found;
  if (constant.isInt()) return {constant.toInt()};
  for (const auto& item : constant.toListRef()) found.push_back(item.toInt());
  return found;
}

ValueList values_in(const Arg& arg) {
  const auto* one = std::get_if<ValueId>(&arg);
  return one ? ValueList{*one} : std::get<ValueList>(arg);
}

size_t ranks_of_group(const Program& program, const Node& node) {
  return program.groups[static_cast<size_t>(group_of(node))].ranks.size();
}

// Bytes of an all-gather or reduce-scatter, whose local shards are padded to the largest one. Argument 1 is the sharded
// dim of each tensor, argument 2 the shard sizes of all ranks along it.
//   sizes [4, 3], 8 bytes per index of the dim:   2 ranks x 4 x 8 bytes
int64_t padded_shard_bytes(const Program& program, const Node& node) {
  const auto dims = integers(node.args[1]), sizes = integers(node.args[2]);
  const auto values = values_in(node.args[0]);
  const auto ranks = ranks_of_group(program, node);
  int64_t bytes = 0;
  for (size_t i = 0; i < values.size(); i++) {
    const auto& type = program[values[i]].type;
    const auto begin = sizes.begin() + static_cast<ptrdiff_t>(i * ranks);
    int64_t slice = type.itemsize();  // bytes of one index of the sharded dim
    for (size_t d = 0; d < type.sizes.size(); d++)
      if (static_cast<int64_t>(d) != dims[i]) slice = product(slice, type.sizes[d]);
    const auto largest = *std::max_element(begin, begin + static_cast<ptrdiff_t>(ranks));
    bytes = sum(bytes, product(product(slice, largest), static_cast<int64_t>(ranks)));
  }
  return bytes;
}

// Bytes of a collective between one local flat tensor and segments of several full tensors: the flat tensors of all
// ranks have the same size.
int64_t flat_bytes_of_all_ranks(const Program& program, const Node& node) {
  int64_t part = 0;
  for (const auto& arg : node.args)
    if (std::holds_alternative<ValueId>(arg)) part = arg_bytes(program, arg);
  return product(part, static_cast<int64_t>(ranks_of_group(program, node)));
}

struct CollectiveRow {
  const char* op;
  comm::CommKind kind;
  int64_t (*bytes)(const Program& program, const Node& node);
};
constexpr CollectiveRow kCollectives[] = {
    {"tessera::all_gather", comm::CommKind::AllGatherIntoTensor, padded_shard_bytes},
    {"tessera::all_gather_coalesced", comm::CommKind::AllGatherCoalesced, padded_shard_bytes},
    {"tessera::all_gather_into_", comm::CommKind::AllGatherIntoTensor, larger_side_bytes},
    {"tessera::all_gather_into_segments_", comm::CommKind::AllGatherIntoTensor, flat_bytes_of_all_ranks},
    {"tessera::all_reduce", comm::CommKind::AllReduce, larger_side_bytes},
    {"tessera::all_reduce_", comm::CommKind::AllReduce, larger_side_bytes},
    {"tessera::all_reduce_coalesced", comm::CommKind::AllReduceCoalesced, larger_side_bytes},
    {"tessera::all_reduce_coalesced_", comm::CommKind::AllReduceCoalesced, larger_side_bytes},
    {"tessera::all_to_all", comm::CommKind::AllToAllSingle, larger_side_bytes},
    {"tessera::broadcast", comm::CommKind::Broadcast, larger_side_bytes},
    {"tessera::broadcast_", comm::CommKind::Broadcast, larger_side_bytes},
    {"tessera::reduce_scatter", comm::CommKind::ReduceScatterTensor, padded_shard_bytes},
    {"tessera::reduce_scatter_coalesced", comm::CommKind::ReduceScatterCoalesced, padded_shard_bytes},
    {"tessera::reduce_scatter_into_", comm::CommKind::ReduceScatterTensor, larger_side_bytes},
    {"tessera::reduce_scatter_segments_into_", comm::CommKind::ReduceScatterTensor, flat_bytes_of_all_ranks},
};

const CollectiveRow* find_collective(const c10::OperatorHandle& op) {
  for (const auto& row : kCollectives)
    if (op.operator_name().name == row.op) return &row;
  return nullptr;
}

}  // namespace

comm::CommKind record_kind(const c10::OperatorHandle& op) {
  const auto* row = find_collective(op);
  return row ? row->kind : comm::CommKind::Count;
}

std::string collective_error(const Program& program, const Node& node) {
  const auto& parameters = node.schema().arguments();
  for (size_t i = 0; i < node.args.size(); i++)  // other ops take a number for a tensor, or one of each run
    if (!std::holds_alternative<GroupName>(node.args[i]) && !result_fits(node.args[i], *parameters[i].type()))
      return c10::str("argument ", parameters[i].name(), " of a collective must be a tensor, a constant or a group");
  const auto* row = find_collective(node.op);
  if (!row || row->bytes != padded_shard_bytes) return "";
  const auto dims = integers(node.args[1]), sizes = integers(node.args[2]);
  const auto values = values_in(node.args[0]);
  const auto ranks = ranks_of_group(program, node);
  if (ranks == 0) return "the group has no ranks";
  if (dims.size() != values.size() || sizes.size() != values.size() * ranks)
    return c10::str(values.size(), " tensors on ", ranks, " ranks have ", dims.size(), " dims and ", sizes.size(),
                    " shard sizes");
  for (size_t i = 0; i < values.size(); i++) {
    if (values[i] == kNone) return "a tensor is undefined";
    const auto ndim = static_cast<int64_t>(program[values[i]].type.sizes.size());
    if (dims[i] < 0 || dims[i] >= ndim) return c10::str("dim ", dims[i], " of a tensor of ", ndim, " dims");
  }
  for (const auto size : sizes)
    if (size < 0) return c10::str("a shard size is ", size);
  return "";
}

Collective collective_of(const Program& program, const Node& node) {
  const auto* row = find_collective(node.op);
  return {record_kind(node.op), row ? row->bytes(program, node) : larger_side_bytes(program, node), group_of(node)};
}

size_t wait_of(const Program& program, size_t node) {
  std::vector<int32_t> written;
  const auto note = [&](ValueId id) { written.push_back(program.buffer_of(id)); };
  program.nodes[node].each_write(note);
  program.nodes[node].each_result(note);
  for (size_t n = node + 1; n < program.nodes.size(); n++) {
    if (kind_of(program.nodes[n]) != OpKind::Wait) continue;
    bool waits = false;
    program.nodes[n].each_read([&](ValueId id) {
      waits |= std::find(written.begin(), written.end(), program.buffer_of(id)) != written.end();
    });
    if (waits) return n;
  }
  return program.nodes.size();
}

}  // namespace tessera::compiler
