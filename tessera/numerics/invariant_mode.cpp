#include "tessera/base/error.h"
#include "tessera/comm/functional_collectives.h"
#include "tessera/dtensor/detail/autograd_functions.h"
#include "tessera/numerics/detail/elementwise.h"
#include "tessera/numerics/detail/innermost_scope.h"
#include "tessera/numerics/detail/rewrites.h"
#include "tessera/numerics/detail/shard_batch.h"
#include "tessera/numerics/detail/tree_ops.h"
#include "tessera/numerics/numerics.h"
#include "tessera/rules/detail/rule.h"
#include "tessera/tracing/detail/compiling_scope.h"
#include "tessera/tracing/detail/invariant_scope.h"
#include "tessera/tracing/op_mode.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <optional>
#include <set>
#include <unordered_map>
#include <utility>

namespace tessera {
namespace {

using numerics::open_shard_batch;
using torch::jit::Stack;

// Results do not depend on an order: data moves, comparisons, and functions that IEEE 754 rounds correctly, so that
// scalar and vector code give the same bits. Pooling and col2im add the windows of one image in the order of their
// positions.
const std::set<std::string, std::less<>> kExactFamilies = {"arranging", "copy",          "factories",
                                                           "joining",   "view_backward", "view"};
const std::set<std::string, std::less<>> kExactOps = {
    "aten::_adaptive_avg_pool2d", "aten::_adaptive_avg_pool2d_backward", "aten::_fused_sdp_choice",
    "aten::_has_compatible_shallow_copy_type", "aten::_local_scalar_dense", "aten::_unsafe_view", "aten::abs",
    "aten::amax", "aten::amin", "aten::arange", "aten::arange.start", "aten::arange.start_step", "aten::avg_pool2d",
    "aten::avg_pool2d_backward", "aten::bincount", "aten::ceil", "aten::clamp", "aten::clamp_min", "aten::col2im",
    "aten::copy_", "aten::div.Scalar", "aten::div.Tensor", "aten::div_.Scalar", "aten::div_.Tensor", "aten::embedding",
    "aten::empty.memory_format", "aten::empty_strided", "aten::eq.Scalar", "aten::eq.Tensor", "aten::equal",
    "aten::fill_.Scalar", "aten::fill_.Tensor", "aten::floor", "aten::full", "aten::gather", "aten::ge.Scalar",
    "aten::ge.Tensor", "aten::gt.Scalar", "aten::gt.Tensor", "aten::im2col", "aten::index_select", "aten::isfinite",
    "aten::isnan", "aten::le.Scalar", "aten::le.Tensor", "aten::lt.Scalar", "aten::lt.Tensor",
    "aten::masked_fill.Scalar", "aten::masked_fill.Tensor", "aten::masked_fill_.Scalar", "aten::max",
    "aten::max_pool2d_with_indices", "aten::max_pool2d_with_indices_backward", "aten::maximum", "aten::min",
    "aten::minimum", "aten::mul.Scalar", "aten::mul.Tensor", "aten::mul.out", "aten::mul_.Scalar", "aten::mul_.Tensor",
    "aten::ne.Scalar", "aten::ne.Tensor", "aten::neg", "aten::neg_", "aten::ones", "aten::reciprocal", "aten::relu",
    "aten::relu_", "aten::reshape", "aten::resolve_conj", "aten::resolve_neg", "aten::scalar_tensor",
    "aten::set_.source_Tensor", "aten::sgn", "aten::sign", "aten::sort", "aten::sort.stable", "aten::sqrt",
    "aten::sqrt_", "aten::threshold", "aten::threshold_backward", "aten::topk", "aten::where.ScalarOther",
    "aten::where.ScalarSelf", "aten::where.self", "aten::zero_", "aten::zeros",
    // Collectives that move data, and local forms of ops above.
    "tessera::_adaptive_avg_pool2d_or_zeros", "tessera::avg_pool2d_or_zeros",
    "tessera::max_pool2d_with_indices_or_zeros", "tessera::all_gather", "tessera::all_gather.out",
    "tessera::all_gather_coalesced", "tessera::all_gather_into_", "tessera::all_gather_into_segments_",
    "tessera::all_to_all", "tessera::all_to_all.out", "tessera::amax_or_lowest", "tessera::amin_or_highest",
    "tessera::broadcast", "tessera::broadcast.out", "tessera::broadcast_", "tessera::masked_embedding",
    "tessera::max_or_lowest", "tessera::min_or_highest", "tessera::pick_class", "tessera::resize", "tessera::rng_state",
    "tessera::set_rng_state", "tessera::squeeze", "tessera::squeeze.dim", "tessera::squeeze.dims", "tessera::wait"};
// What this scope makes of other ops.
const std::set<std::string, std::less<>> kOwnOps = {
    "tessera::adam_",        "tessera::adam_.tensor_lr",   "tessera::add_at",
    "tessera::add_disjoint", "tessera::row_attention",     "tessera::row_attention_backward",
    "tessera::row_norm",     "tessera::row_norm_backward", "tessera::tree_embedding_gradient",
    "tessera::tree_product", "tessera::tree_sum"};

enum class InvariantForm : uint8_t {
  Exact,        // the op as it is
  Own,          // likewise: this scope calls it
  Elementwise,  // run_elementwise
  Addition,     // exact if alpha is 1, else elementwise
  Rewrite,      // op_rewrites
  Composite,    // LibTorch's composite kernel, whose ops are intercepted
  Implicit,     // likewise, for a composite op that is called below autograd
  Random,       // on DTensors: functions of the global index. On plain tensors LibTorch's generator draws other numbers
  Reduction,    // a collective that reduces
  None,
};

struct OpForm {
  InvariantForm form;
  const numerics::OpRewrite* rewrite = nullptr;
};

OpForm form_of(const std::string& name) {
  if (const auto found = numerics::op_rewrites().find(name); found != numerics::op_rewrites().end())
    return {InvariantForm::Rewrite, &found->second};
  if (kExactOps.count(name) || name.starts_with("tessera::philox_")) return {InvariantForm::Exact};
  if (kOwnOps.count(name) || name.starts_with("tessera::elementwise_")) return {InvariantForm::Own};
  if (name == "tessera::all_reduce" || name == "tessera::all_reduce_" || name == "tessera::reduce_scatter")
    return {InvariantForm::Reduction};
  if (name.starts_with("aten::_foreach_")) return {InvariantForm::Composite};
  const auto* rule = rules::registry().find(name);
  if (!rule) return {InvariantForm::None};
  if (kExactFamilies.count(rule->family)) return {InvariantForm::Exact};
  if (std::string_view(rule->family) == "random") return {InvariantForm::Random};
  if (rule->family != "pointwise") return {InvariantForm::None};
  const auto overload = std::string_view(name).substr(0, name.find('.'));
  const bool adds = overload == "aten::add" || overload == "aten::sub" || overload == "aten::add_" ||
                    overload == "aten::sub_" || overload == "aten::rsub";
  return {adds ? InvariantForm::Addition : InvariantForm::Elementwise};
}

OpForm cached_form(const c10::OperatorHandle& op) {
  thread_local std::unordered_map<const void*, OpForm> forms;  // bounded by the number of ops
  const auto [found, is_new] = forms.try_emplace(&op.schema());
  if (is_new) {
    const auto& name = op.operator_name();
    found->second = form_of(name.overload_name.empty() ? name.name : name.name + "." + name.overload_name);
    if (found->second.form == InvariantForm::None &&
        op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd))
      found->second.form = InvariantForm::Implicit;
  }
  return found->second;
}

template <class F>
void for_tensors(c10::ArrayRef<c10::IValue> values, F f) {
  for (const auto& v : values) {
    if (v.isTensor() && v.toTensor().defined()) f(v.toTensor());
    if (v.isList())
      for (const auto& x : v.toListRef())
        if (x.isTensor() && x.toTensor().defined()) f(x.toTensor());
  }
}

bool has_floats(c10::ArrayRef<c10::IValue> values) {
  bool found = false;
  for_tensors(values, [&](const at::Tensor& t) { found |= t.is_floating_point() || t.is_complex(); });
  return found;
}

c10::ArrayRef<c10::IValue> top(const Stack& stack, size_t count) {
  return c10::ArrayRef<c10::IValue>(stack).slice(stack.size() - count);
}

bool alpha_is_one(const c10::OperatorHandle& op, const Stack& stack) {
  const auto alpha = op.schema().argumentIndexWithName("alpha");
  return !alpha || top(stack, op.schema().arguments().size())[static_cast<size_t>(*alpha)].toScalar().toDouble() == 1;
}

// A sum over ranks is exact if at most one rank has a nonzero value for each element, as after a lookup in a sharded
// table. Its result is then the same for every order and on every mesh. Any other sum throws.
at::Tensor exact_sum_over_ranks(const at::Tensor& x, const comm::Group& group, const std::string& op) {
  auto all = funcol::all_gather(x.unsqueeze(0), 0, std::vector<int64_t>(static_cast<size_t>(group->size()), 1), group);
  funcol::wait(all, group);
  return numerics::add_disjoint(all, c10::str(op, " over group '", group->name(), "'"));
}

class InvariantMode;
thread_local const InvariantMode* active_mode = nullptr;  // of this thread; outer ones pass ops on

class InvariantMode final : public OpMode {
 public:
  void run(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) override {
    if (!invariant_scope_is_open() || active_mode != this) return next(op, keys, stack);
    const auto [form, rewrite] = cached_form(op);
    const bool distributed = keys.has_backend(c10::BackendComponent::PrivateUse3Bit);
    const auto arguments = op.schema().arguments().size();
    switch (form) {
      case InvariantForm::Exact:
        return run_exact(op, keys, stack, distributed);
      case InvariantForm::Own:
        return next(op, keys, stack);
      case InvariantForm::Elementwise:
      case InvariantForm::Addition:
        if (distributed || !has_floats(top(*stack, arguments)) ||
            (form == InvariantForm::Addition && alpha_is_one(op, *stack)))
          return run_exact(op, keys, stack, distributed);
        if (compiling()) {
          const at::AutoDispatchBelowADInplaceOrView below;
          return numerics::registered_elementwise(op).callBoxed(stack);
        }
        return numerics::run_elementwise(op, stack);
      case InvariantForm::Rewrite: {
        if (!has_floats(top(*stack, arguments))) return run_integers(op, keys, stack, distributed);
        if (distributed && numerics::runs_on_local_tensors(*rewrite, *stack, arguments))
          return run_exact(op, keys, stack, true);
        const at::AutoDispatchBelowADInplaceOrView below;
        return rewrite->run(stack, arguments);
      }
      case InvariantForm::Composite: {
        const at::AutoDispatchBelowADInplaceOrView below;
        return op.callBoxedForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd, *stack);
      }
      case InvariantForm::Implicit: {
        const at::AutoDispatchBelowADInplaceOrView below;
        return op.callBoxedForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd, *stack);
      }
      case InvariantForm::Random:
        TESSERA_CHECK(distributed || in_distributed_op_, UsageError, "Numerics::Invariant: ", op.operator_name(),
                      " draws from LibTorch's generator for a plain tensor, and by global index for a DTensor; use ",
                      "DTensors for random numbers, and no dropout on plain tensors");
        TESSERA_CHECK(!open_shard_batch() || !open_shard_batch()->several, UsageError,
                      "Numerics::Invariant: ", op.operator_name(),
                      " in a pass of VirtualShards over several virtual shards, whose random numbers ",
                      "depend on how many there are; compute one virtual shard at a time");
        return run_exact(op, keys, stack, distributed);
      case InvariantForm::Reduction:
        return run_reduction(op, keys, stack);
      case InvariantForm::None:
        return run_integers(op, keys, stack, distributed);
    }
  }

 private:
  // No result stays partial: a later reduction would have the order of the mesh.
  void run_exact(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack, bool distributed) {
    if (!distributed) return next(op, keys, stack);
    {
      const auto outer = c10::make_scope_exit([this, before = in_distributed_op_] { in_distributed_op_ = before; });
      in_distributed_op_ = true;
      next(op, keys, stack);
    }
    const auto results = op.schema().returns().size();
    for (size_t i = stack->size() - results; i < stack->size(); i++) {
      auto& v = (*stack)[i];
      if (!v.isTensor() || !is_dtensor(v.toTensor())) continue;
      const auto& spec = *detail::meta_of(v.toTensor()).spec;
      if (!spec.has_partial()) continue;
      Placements placements(spec.placements.begin(), spec.placements.end());
      for (auto& p : placements)
        if (p.is_partial()) p = Replicate();
      v = detail::redistribute_no_grad(v.toTensor(), with_placements(spec, placements));
    }
  }

  // Sums of integers are exact. Any other op without an invariant kernel throws.
  void run_integers(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack, bool distributed) {
    const auto refuse = [&] {
      TESSERA_FAIL(
          UsageError, "Numerics::Invariant: ", op.operator_name(),
          " has no kernel whose bits are independent of the mesh. invariant_ops() lists the ops that have one; "
          "rewrite the call with these, or run it outside of the scope.");
    };
    if (has_floats(top(*stack, op.schema().arguments().size()))) refuse();
    run_exact(op, keys, stack, distributed);
    if (has_floats(top(*stack, op.schema().returns().size()))) refuse();
  }

  void run_reduction(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) const {
    const auto arguments = top(*stack, op.schema().arguments().size());
    const auto argument = [&](const char* name) {
      return arguments[static_cast<size_t>(*op.schema().argumentIndexWithName(name))];
    };
    const auto x = argument("x").toTensor();
    const auto kind = argument("op").toStringRef();
    const auto group = argument("group").toCustomClass<comm::Communicator>();
    if (!x.is_floating_point() || kind == "max" || kind == "min" || group->size() == 1) return next(op, keys, stack);
    const auto& name = op.schema().name();
    TESSERA_CHECK(kind == "sum", UsageError, "Numerics::Invariant: ", name, " with op ", kind, " over group '",
                  group->name(), "'; only sum, max and min can be invariant");
    auto sum = exact_sum_over_ranks(x, group, name);
    if (name == "tessera::reduce_scatter") {
      const auto sizes = argument("sizes").toIntVector();
      int64_t begin = 0;
      for (int64_t r = 0; r < group->rank(); r++) begin += sizes[static_cast<size_t>(r)];
      const InvariantScopePaused paused;
      sum = sum.narrow(argument("dim").toInt(), begin, sizes[static_cast<size_t>(group->rank())]).contiguous();
    } else if (name == "tessera::all_reduce_") {
      const InvariantScopePaused paused;
      x.copy_(sum);
      sum = x;
    }
    torch::jit::drop(*stack, op.schema().arguments().size());
    stack->emplace_back(std::move(sum));
  }

  bool in_distributed_op_ = false;
};

// While alive, a new mode is the active and innermost one.
struct ActiveMode {
  InvariantMode mode;
  OpModeScope scope{mode};
  const InvariantMode* outer = std::exchange(active_mode, &mode);
  ~ActiveMode() { active_mode = outer; }
};

}  // namespace

struct NumericsScope::State : ActiveMode {};

NumericsScope::NumericsScope(Numerics numerics) {
  if (numerics != Numerics::Invariant || invariant_scope_is_open()) return;
  state_ = std::make_unique<State>();
  invariant_scope_is_open() = true;
}
NumericsScope::~NumericsScope() {
  if (state_) invariant_scope_is_open() = false;
}

namespace numerics {

struct InnermostScope::State : ActiveMode {};
InnermostScope::InnermostScope() : state_(invariant_scope_is_open() ? std::make_unique<State>() : nullptr) {}
InnermostScope::~InnermostScope() = default;

}  // namespace numerics

std::vector<InvariantOp> invariant_ops() {
  std::vector<InvariantOp> ops;
  for (const auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
    const auto full = name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
    if (!full.starts_with("aten::") && !full.starts_with("tessera::")) continue;
    switch (form_of(full).form) {
      case InvariantForm::Exact:
        ops.push_back({full, "exact"});
        break;
      case InvariantForm::Elementwise:
      case InvariantForm::Addition:
        ops.push_back({full, "elementwise"});
        break;
      case InvariantForm::Rewrite:
        ops.push_back({full, numerics::op_rewrites().at(full).kind == numerics::RewriteKind::Primitive ? "sum tree"
                                                                                                       : "decomposed"});
        break;
      case InvariantForm::Composite:
      case InvariantForm::Implicit:
        ops.push_back({full, "decomposed"});
        break;
      case InvariantForm::Random:
        ops.push_back({full, "on DTensors, by global index"});
        break;
      case InvariantForm::Reduction:
        ops.push_back({full, "if at most one rank has a nonzero value"});
        break;
      case InvariantForm::Own:
      case InvariantForm::None:
        break;
    }
  }
  std::sort(ops.begin(), ops.end(), [](const auto& l, const auto& r) { return l.op < r.op; });
  return ops;
}

}  // namespace tessera
