#include "tessera/base/detail/module_name.h"
#include "tessera/compile/detail/trace/tracer.h"
#include "tessera/dtensor/detail/meta.h"

#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/any.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/eye.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/graph_task.h>

// Ops that depend on values: they return a number to the host, their results have sizes that depend on values, or their
// kernels reject some values. A program cannot read values, but these cases have one answer in every run, or an answer
// that a run can check:
//
//   a value that depends on no input (the mask of combinations())     the answer of the trace
//   an integer or a flag that a formula of backward reads             the answer of the trace; each run checks it
//   errors of linalg functions                                        each run checks them
//
// Formulas of backward ask for special cases: a NaN in the input of max(), a zero in the input of prod(). Results of
// collectives are unknown in a trace, so the special case is taken not to be there.
namespace tessera::compiler {
namespace {

using tessera::detail::local_or_self;

bool has_integer_indices(const c10::IValue& indices) {
  for (const c10::IValue& index : indices.toListRef())
    if (index.isTensor() && index.toTensor().defined() &&
        (index.toTensor().scalar_type() == at::kBool || index.toTensor().scalar_type() == at::kByte))
      return false;
  return true;
}

// The sizes of residuals depend on the rank of the matrix with the drivers gelss and gelsd.
bool has_fixed_residuals(const c10::IValue& driver) {
  return driver.isNone() || (driver.toStringRef() != "gelss" && driver.toStringRef() != "gelsd");
}

bool in_backward() { return torch::autograd::get_current_graph_task_id() != -1; }

// Values that a kernel accepts in place of the zeros of a placeholder.
at::Tensor identity_matrix(const at::Tensor& like, const torch::jit::Stack& /*args*/) {
  return at::eye(like.size(-2), like.size(-1), like.options()).expand(like.sizes()).contiguous();
}
at::Tensor ones(const at::Tensor& like, const torch::jit::Stack& /*args*/) { return at::ones_like(like); }
// The first segment has all elements.
at::Tensor one_segment(const at::Tensor& like, const torch::jit::Stack& args) {
  auto lengths = at::zeros_like(like);
  lengths.select(-1, 0).fill_(args[0].toTensor().size(args[5].toInt()));
  return lengths;
}

struct AcceptedValues {
  const char* op;
  size_t argument;
  at::Tensor (*make)(const at::Tensor& like, const torch::jit::Stack& args);
};
constexpr AcceptedValues kAcceptedValues[] = {
    {"aten::cholesky", 0, identity_matrix}, {"aten::linalg_lstsq", 0, identity_matrix},
    {"aten::linalg_ldl_solve", 1, ones},    {"aten::linalg_lu_solve", 1, ones},
    {"aten::lu_unpack", 1, ones},           {"aten::segment_reduce", 2, one_segment},
};

}  // namespace

bool Tracer::is_constant(const at::Tensor& t) {
  if (!t.defined() || !t.has_storage()) return false;
  const auto known = buffer_ids_.find(t.storage().unsafeGetStorageImpl());
  return known != buffer_ids_.end() && buffers_[static_cast<size_t>(known->second)].constant;
}

// Does the result have the same sizes in every run?
bool Tracer::has_fixed_sizes(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  const auto& name = op.operator_name().name;
  const auto args = torch::jit::last(stack, op.schema().arguments().size());
  if (name == "aten::index") return has_integer_indices(args[1]);
  if (name == "aten::_ctc_loss") return op.operator_name().overload_name.empty();  // lengths are lists of integers
  if (name == "aten::linalg_lstsq") return has_fixed_residuals(args[3]);
  if (name == "aten::masked_select") return is_constant(args[1].toTensor());
  if (name == "aten::nonzero") return is_constant(args[0].toTensor());
  return false;
}

// Answers a read in the trace. False: the value can be another one in the next run.
bool Tracer::read_on_host(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const auto& name = op.operator_name().name;
  if (name == "aten::_local_scalar_dense") {
    const auto t = torch::jit::peek(*stack, 0, 1).toTensor();
    const bool checkable = in_backward() && !t.is_floating_point() && !t.is_complex();
    if (!checkable && !is_constant(t)) return false;
    read_number(op, keys, stack);
    return true;
  }
  if (!in_backward()) return false;
  if (name == "aten::allclose") {
    op.callBoxedForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd, *stack);
    return true;
  }
  if (name == "aten::nonzero") {  // prod() asks where its input is zero
    const auto t = torch::jit::peek(*stack, 0, 1).toTensor();
    if (at::_local_scalar_dense(at::any(t)).toBool()) return false;
    const OpModesOff off;
    torch::jit::drop(*stack, 1);
    stack->emplace_back(at::empty({0, t.dim()}, t.options().dtype(at::kLong)));
    return true;
  }
  return false;
}

void Tracer::read_number(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const auto t = torch::jit::peek(*stack, 0, 1).toTensor();
  Node node{find_op("tessera.check_value"), {read_tensor(t, Role::Captured)}, {}, running_module()};
  keep_numbers_from_host(op, node.args);
  if (any_unknown(node)) {
    torch::jit::drop(*stack, 1);
    stack->emplace_back(assumed_number(t));
  } else {
    set_protected(node, false);
    next(op, keys, stack);
    set_protected(node, true);
  }
  if (all_constant(node)) return;
  node.args.emplace_back(stack->back());
  program_.nodes.push_back(std::move(node));
}

// Of a value that depends on collectives: no special case, so all() is true and any(), sum() and others are 0.
at::Scalar Tracer::assumed_number(const at::Tensor& t) const {
  bool all = false;
  for (auto node = program_.nodes.rbegin(); node != program_.nodes.rend(); ++node) {
    if (kind_of(*node) != OpKind::Plain || is_view(program_, *node)) continue;
    all = node->op.operator_name().name == "aten::all";
    break;
  }
  return t.scalar_type() == at::kBool ? at::Scalar(all) : at::Scalar(int64_t{all});
}

// _linalg_check_errors(info, ...) reads whether a factorization has failed. Each run does so, on the local tensor.
void Tracer::check_errors_at_run(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Node node{op, {}, {}, running_module()};
  const auto args = torch::jit::last(*stack, op.schema().arguments().size());
  node.args.push_back(read_tensor(local_or_self(args[0].toTensor()), Role::Captured));
  for (size_t i = 1; i < args.size(); i++) node.args.emplace_back(args[i]);
  torch::jit::drop(*stack, args.size());
  program_.nodes.push_back(std::move(node));
}

// Kernels that check their values would reject placeholders.
void Tracer::replace_rejected_values(const Node& node, torch::jit::Stack& stack) const {
  const auto count = node.schema().arguments().size();
  for (const auto& each : kAcceptedValues) {
    if (node.op.operator_name().name != each.op) continue;
    const auto* id = std::get_if<ValueId>(&node.args[each.argument]);
    if (!id || *id == kNone || !buffers_[static_cast<size_t>(program_.buffer_of(*id))].unknown) continue;
    const OpModesOff off;
    const torch::jit::Stack args(stack.end() - static_cast<ptrdiff_t>(count), stack.end());
    auto& given = *(stack.end() - static_cast<ptrdiff_t>(count - each.argument));
    given = each.make(given.toTensor(), args);
  }
}

}  // namespace tessera::compiler
