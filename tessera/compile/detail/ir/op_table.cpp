#include "tessera/compile/detail/ir/op_table.h"

#include <ATen/core/enum_tag.h>

#include <unordered_map>
#include <unordered_set>

namespace tessera::compiler {
namespace {

constexpr OpRow kOpTable[] = {
    {"aten.empty.memory_format", OpKind::Empty, nullptr},
    {"aten.empty_strided", OpKind::Empty, nullptr},
    {"aten.empty_like", OpKind::Empty, nullptr},
    {"aten.new_empty", OpKind::Empty, nullptr},
    {"aten.new_empty_strided", OpKind::Empty, nullptr},
    {"tessera.all_reduce", OpKind::Collective, "torch.ops._c10d_functional.all_reduce.default"},
    {"tessera.all_reduce_", OpKind::Collective, "torch.ops._c10d_functional.all_reduce_.default"},
    {"tessera.all_reduce_coalesced", OpKind::Collective, "torch.ops._c10d_functional.all_reduce_coalesced.default"},
    {"tessera.all_reduce_coalesced_", OpKind::Collective, "torch.ops._c10d_functional.all_reduce_coalesced_.default"},
    {"tessera.all_gather", OpKind::Collective, "torch.ops._c10d_functional.all_gather_into_tensor.default"},
    {"tessera.all_gather_coalesced", OpKind::Collective,
     "torch.ops._c10d_functional.all_gather_into_tensor_coalesced.default"},
    {"tessera.all_gather_into_", OpKind::Collective, "torch.ops._c10d_functional.all_gather_into_tensor_out.default"},
    {"tessera.reduce_scatter", OpKind::Collective, "torch.ops._c10d_functional.reduce_scatter_tensor.default"},
    {"tessera.reduce_scatter_coalesced", OpKind::Collective,
     "torch.ops._c10d_functional.reduce_scatter_tensor_coalesced.default"},
    {"tessera.reduce_scatter_into_", OpKind::Collective,
     "torch.ops._c10d_functional.reduce_scatter_tensor_out.default"},
    {"tessera.all_gather_into_segments_", OpKind::Collective,
     "torch.ops._c10d_functional.all_gather_into_tensor_out.default"},
    {"tessera.reduce_scatter_segments_into_", OpKind::Collective,
     "torch.ops._c10d_functional.reduce_scatter_tensor_out.default"},
    {"tessera.all_to_all", OpKind::Collective, "torch.ops._c10d_functional.all_to_all_single.default"},
    {"tessera.broadcast", OpKind::Collective, "torch.ops._c10d_functional.broadcast.default"},
    {"tessera.broadcast_", OpKind::Collective, "torch.ops._c10d_functional.broadcast_.default"},
    {"tessera.wait", OpKind::Wait, "torch.ops._c10d_functional.wait_tensor.default"},
    {"tessera.rng_state", OpKind::Random, nullptr},
    {"tessera.set_rng_state", OpKind::Random, nullptr},
    {"tessera.check_equal", OpKind::Check, nullptr},
    {"tessera.check_value", OpKind::Check, nullptr},
    {"aten._linalg_check_errors", OpKind::Check, nullptr},
    {"aten._local_scalar_dense", OpKind::Reads, nullptr},
    {"aten.item", OpKind::Reads, nullptr},
    {"aten.is_nonzero", OpKind::Reads, nullptr},
    {"aten.equal", OpKind::Reads, nullptr},
    {"aten.allclose", OpKind::Reads, nullptr},
};

// Looks up by OperatorName, so that no string is built per call.
const OpRow* find_op_row(const c10::OperatorName& name) {
  static const auto* rows = [] {
    auto* by_name = new std::unordered_map<c10::OperatorName, const OpRow*>;
    for (const auto& row : kOpTable) {
      std::string text = row.name;
      const auto first = text.find('.'), second = text.find('.', first + 1);
      by_name->emplace(c10::OperatorName(text.substr(0, first) + "::" + text.substr(first + 1, second - first - 1),
                                         second == std::string::npos ? "" : text.substr(second + 1)),
                       &row);
    }
    return by_name;
  }();
  const auto found = rows->find(name);
  return found == rows->end() ? nullptr : found->second;
}

bool has_tag(const c10::OperatorHandle& op, at::Tag tag) {
  for (const auto each : op.getTags())
    if (each == tag) return true;
  return false;
}

// The older batch norm ops write into running_mean and running_var, but their schemas do not mark these arguments.
bool updates_running_statistics(const c10::OperatorHandle& op) {
  static const auto* names = new std::unordered_set<std::string>{"aten::native_batch_norm", "aten::cudnn_batch_norm",
                                                                 "aten::miopen_batch_norm"};
  return names->count(op.operator_name().name) > 0;
}

}  // namespace

std::vector<c10::OperatorHandle> ops_listed_as(const std::string& name) {
  std::vector<c10::OperatorHandle> found;
  for (const auto& row : kOpTable)
    if (row.listed_as && name == row.listed_as) found.push_back(find_op(row.name));
  return found;
}

const OpRow* row_of(const Node& node) { return find_op_row(node.op.operator_name()); }

OpKind kind_of(const c10::OperatorHandle& op) {
  if (const auto* row = find_op_row(op.operator_name())) return row->kind;
  if (has_tag(op, at::Tag::dynamic_output_shape) || has_tag(op, at::Tag::data_dependent_output)) return OpKind::Reads;
  if (has_tag(op, at::Tag::nondeterministic_seeded) || op.operator_name().name.starts_with("tessera::philox_"))
    return OpKind::Random;
  return OpKind::Plain;
}

bool writes_argument(const c10::OperatorHandle& op, size_t argument) {
  if (argument >= op.schema().arguments().size()) return false;  // of an invalid node, which verify() prints
  const auto* alias = op.schema().arguments()[argument].alias_info();
  if (alias && alias->isWrite()) return true;
  return (argument == 3 || argument == 4) && updates_running_statistics(op);
}

bool is_pure(const Node& node) {
  const auto kind = kind_of(node);
  return (kind == OpKind::Plain || kind == OpKind::Empty) && !node.schema().is_mutable() &&
         !updates_running_statistics(node.op);
}

bool is_view(const Program& program, const Node& node) {
  if (node.schema().is_mutable()) return false;
  bool any = false, all = true;
  node.each_result([&](ValueId result) {
    bool here = false;
    node.each_read([&](ValueId read) { here |= program.buffer_of(read) == program.buffer_of(result); });
    any = true;
    all &= here;
  });
  return any && all;
}

int32_t group_of(const Node& node) {
  for (const auto& arg : node.args)
    if (const auto* group = std::get_if<GroupName>(&arg)) return group->group;
  return -1;
}

bool is_generated(const Node& node) { return node.op.operator_name().name == "tessera::cpp_kernel"; }
const std::string& generated_name(const Node& node) { return std::get<c10::IValue>(node.args[2]).toStringRef(); }

}  // namespace tessera::compiler
