#include "tessera/compile/detail/ir/collective.h"

#include "tessera/compile/detail/ir/op_table.h"

#include <algorithm>

namespace tessera::compiler {
namespace {

using comm::Kind;

int64_t bytes_of(const Program& program, const Arg& arg) {
  if (const auto* id = std::get_if<ValueId>(&arg)) return *id == kNone ? 0 : program[*id].type.bytes();
  int64_t bytes = 0;
  if (const auto* list = std::get_if<ValueList>(&arg))
    for (const auto id : *list) bytes += id == kNone ? 0 : program[id].type.bytes();
  return bytes;
}

int64_t largest_side(const Program& program, const Node& node) {
  int64_t given = 0, got = 0;
  for (const auto& arg : node.args) given = std::max(given, bytes_of(program, arg));
  for (const auto& result : node.results) got = std::max(got, bytes_of(program, result));
  return std::max(given, got);
}

std::vector<int64_t> integers(const Arg& arg) {
  const auto& constant = std::get<c10::IValue>(arg);
  std::vector<int64_t> found;
  if (constant.isInt()) return {constant.toInt()};
  for (const auto& item : constant.toListRef()) found.push_back(item.toInt());
  return found;
}

// Pieces travel padded to the longest: dims are argument 1, sizes argument 2, as many for each tensor as there are
// ranks.   sizes [4, 3] of rows of 8 bytes: 2 ranks x 4 rows x 8
int64_t padded_pieces(const Program& program, const Node& node) {
  const auto dims = integers(node.args[1]), sizes = integers(node.args[2]);
  const auto* one = std::get_if<ValueId>(&node.args[0]);
  const auto values = one ? ValueList{*one} : std::get<ValueList>(node.args[0]);
  const auto ranks = sizes.size() / values.size();
  int64_t bytes = 0;
  for (size_t i = 0; i < values.size(); i++) {
    const auto& type = program[values[i]].type;
    const auto begin = sizes.begin() + static_cast<ptrdiff_t>(i * ranks);
    int64_t row = type.itemsize();
    for (size_t d = 0; d < type.sizes.size(); d++)
      if (static_cast<int64_t>(d) != dims[i]) row *= type.sizes[d];
    bytes += row * *std::max_element(begin, begin + static_cast<ptrdiff_t>(ranks)) * static_cast<int64_t>(ranks);
  }
  return bytes;
}

// Between one tensor, a rank's part, and runs of many: as much for every rank as the part has.
int64_t parts_of_all(const Program& program, const Node& node) {
  int64_t part = 0;
  for (const auto& arg : node.args)
    if (std::holds_alternative<ValueId>(arg)) part = bytes_of(program, arg);
  return part * static_cast<int64_t>(program.groups[static_cast<size_t>(group_of(node))].ranks.size());
}

struct Row {
  const char* op;
  CommKind kind;
  int64_t (*bytes)(const Program& program, const Node& node);
};
constexpr Row kRows[] = {
    {"tessera::all_gather", Kind::AllGatherIntoTensor, padded_pieces},
    {"tessera::all_gather_coalesced", Kind::AllGatherCoalesced, padded_pieces},
    {"tessera::all_gather_into_", Kind::AllGatherIntoTensor, largest_side},
    {"tessera::all_gather_into_runs_", Kind::AllGatherIntoTensor, parts_of_all},
    {"tessera::all_reduce", Kind::AllReduce, largest_side},
    {"tessera::all_reduce_", Kind::AllReduce, largest_side},
    {"tessera::all_reduce_coalesced", Kind::AllReduceCoalesced, largest_side},
    {"tessera::all_reduce_coalesced_", Kind::AllReduceCoalesced, largest_side},
    {"tessera::all_to_all", Kind::AllToAllSingle, largest_side},
    {"tessera::broadcast", Kind::Broadcast, largest_side},
    {"tessera::broadcast_", Kind::Broadcast, largest_side},
    {"tessera::reduce_scatter", Kind::ReduceScatterTensor, padded_pieces},
    {"tessera::reduce_scatter_coalesced", Kind::ReduceScatterCoalesced, padded_pieces},
    {"tessera::reduce_scatter_into_", Kind::ReduceScatterTensor, largest_side},
    {"tessera::reduce_scatter_runs_into_", Kind::ReduceScatterTensor, parts_of_all},
};

const Row* find(const c10::OperatorHandle& op) {
  for (const auto& row : kRows)
    if (op.operator_name().name == row.op) return &row;
  return nullptr;
}

}  // namespace

CommKind record_kind(const c10::OperatorHandle& op) {
  const auto* row = find(op);
  return row ? row->kind : Kind::Count;
}

Collective collective_of(const Program& program, const Node& node) {
  const auto* row = find(node.op);
  return {record_kind(node.op), row ? row->bytes(program, node) : largest_side(program, node), group_of(node)};
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
