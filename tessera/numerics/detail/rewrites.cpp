#include "tessera/numerics/detail/rewrites.h"

#include "tessera/base/error.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/numerics/detail/mesh_sum.h"
#include "tessera/numerics/detail/rewrite_arguments.h"
#include "tessera/numerics/detail/tree_ops.h"
#include "tessera/tracing/detail/invariant_scope.h"

#include <ATen/core/Reduction.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_fused_rms_norm_backward.h>
#include <ATen/ops/add.h>
#include <ATen/ops/amax.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/exp.h>
#include <ATen/ops/gather.h>
#include <ATen/ops/log.h>
#include <ATen/ops/native_layer_norm_backward.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/sqrt.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/WrapDimMinimal.h>

#include <algorithm>
#include <cmath>
#include <limits>

namespace tessera::numerics {
namespace {

using at::Tensor;
using c10::IValue;
using torch::jit::Stack;

void check_same_dtype(const IValue& dtype, const Tensor& x, const char* op) {
  TESSERA_CHECK(dtype.isNone() || dtype.toScalarType() == x.scalar_type(), UsageError, "Numerics::Invariant: ", op,
                " with another dtype than that of its input, ", x.scalar_type(), "; convert the input first");
}

// ---- primitives ----

Tensor sum_one(const Tensor& x, int64_t dim, bool keepdim) {
  return sum_over_mesh({"aten::sum.dim_IntList", {x, std::vector<int64_t>{dim}, keepdim, IValue()}, {dim}}, 0,
                       [dim, keepdim](const std::vector<Tensor>& locals, const Terms& terms, IndexRange) {
                         auto sums = tree_sum(locals[0], dim, terms);
                         return keepdim ? sums.unsqueeze(dim + 1) : sums;
                       });
}

}  // namespace

Tensor product(const Tensor& a, const Tensor& b) {
  const bool batched = a.dim() == 3;
  return sum_over_mesh({batched ? "aten::bmm" : "aten::mm", {a, b}, {a.dim() - 1, a.dim() - 2}}, a.size(0),
                       [](const std::vector<Tensor>& locals, const Terms& k, IndexRange) {
                         return tree_product(locals[0], locals[1], k);
                       });
}

// Sums over several dims, the last one first. Each is a tree of its own, so every one of them can be sharded.
Tensor sum_dims(const Tensor& x, std::vector<int64_t> dims, bool keepdim) {
  for (auto& dim : dims) dim = c10::maybe_wrap_dim(dim, x.dim());
  std::sort(dims.rbegin(), dims.rend());
  Tensor result = x;
  for (const auto dim : dims) result = sum_one(result, dim, keepdim);
  return result;
}

namespace {

std::vector<int64_t> all_dims(const Tensor& x) {
  std::vector<int64_t> dims;
  for (int64_t d = 0; d < x.dim(); d++) dims.push_back(d);
  return dims;
}
std::vector<int64_t> dims_or_all(const IValue& dims, const Tensor& x) {
  const auto given = dims.isNone() ? std::vector<int64_t>{} : dims.toIntVector();
  return given.empty() ? all_dims(x) : given;
}
int64_t count_over(const Tensor& x, const std::vector<int64_t>& dims) {
  int64_t count = 1;
  for (const auto d : dims) count *= x.size(d);
  return count;
}

void run_mm(Stack* stack, size_t count) {
  Arguments args(stack, count);
  args.reply(product(args.tensor(0), args.tensor(1)));
}

void run_sum(Stack* stack, size_t count) {  // sum(self, *, dtype)
  Arguments args(stack, count);
  const auto x = args.tensor(0);
  check_same_dtype(args[1], x, "sum");
  args.reply(sum_dims(x, all_dims(x), false));
}

void run_sum_dims(Stack* stack, size_t count) {  // sum.dim_IntList(self, dim, keepdim, *, dtype)
  Arguments args(stack, count);
  const auto x = args.tensor(0);
  check_same_dtype(args[3], x, "sum");
  args.reply(sum_dims(x, dims_or_all(args[1], x), args[2].toBool()));
}

void run_embedding_backward(Stack* stack,
                            size_t count) {  // grad_output, indices, num_weights, padding_idx, scale_grad_by_freq
  Arguments args(stack, count);
  TESSERA_CHECK(!args[4].toBool(), UsageError,
                "Numerics::Invariant: embedding_dense_backward with scale_grad_by_freq; use an Embedding without it");
  const auto grad = args.tensor(0), indices = args.tensor(1);
  const auto rows = args[2].toInt(), padding = args[3].toInt();
  const auto flat_grad = grad.reshape({-1, grad.size(-1)}), flat_indices = indices.reshape({-1});
  args.reply(
      sum_over_mesh({"aten::embedding_dense_backward", {flat_grad, flat_indices, rows, padding, false}, {0, 0}, 1},
                    rows, [padding](const std::vector<Tensor>& locals, const Terms& tokens, IndexRange table) {
                      return tree_embedding_gradient(locals[0], locals[1] - table.begin, table.end - table.begin,
                                                     padding - table.begin, tokens);
                    }));
}

// ---- sequences ----

Tensor scaled(const Tensor& x, double factor) { return factor == 1 ? x : x * factor; }

// beta * self + alpha * product
void run_addmm(Stack* stack, size_t count) {
  Arguments args(stack, count);
  const double beta = args.number(3), alpha = args.number(4);
  const auto y = scaled(product(args.tensor(1), args.tensor(2)), alpha);
  args.reply(beta == 0 ? y : y + scaled(args.tensor(0), beta));
}

void run_mean(Stack* stack, size_t count) {  // mean(self, *, dtype)
  Arguments args(stack, count);
  const auto x = args.tensor(0);
  check_same_dtype(args[1], x, "mean");
  args.reply(sum_dims(x, all_dims(x), false) / static_cast<double>(x.numel()));
}

void run_mean_dims(Stack* stack, size_t count) {  // mean.dim(self, dim, keepdim, *, dtype)
  Arguments args(stack, count);
  const auto x = args.tensor(0);
  check_same_dtype(args[3], x, "mean");
  const auto dims = dims_or_all(args[1], x);
  args.reply(sum_dims(x, dims, args[2].toBool()) / static_cast<double>(count_over(x, dims)));
}

Tensor reduced(const Tensor& rows, int64_t reduction) {
  if (reduction == at::Reduction::None) return rows;
  const auto total = sum_dims(rows, all_dims(rows), false);
  return reduction == at::Reduction::Sum ? total : total / static_cast<double>(rows.numel());
}

void run_mse_loss(Stack* stack, size_t count) {  // self, target, reduction
  Arguments args(stack, count);
  const auto difference = args.tensor(0) - args.tensor(1);
  args.reply(reduced(difference * difference, args[2].toInt()));
}

void run_mse_loss_backward(Stack* stack, size_t count) {  // grad_output, self, target, reduction
  Arguments args(stack, count);
  const auto difference = args.tensor(1) - args.tensor(2);
  const bool mean = args[3].toInt() == at::Reduction::Mean;
  args.reply((difference * (mean ? 2.0 / static_cast<double>(difference.numel()) : 2.0)) * args.tensor(0));
}

// Square root of the sum of squares.
void run_vector_norm(Stack* stack, size_t count) {  // linalg_vector_norm(self, ord, dim, keepdim, *, dtype)
  Arguments args(stack, count);
  const auto x = args.tensor(0);
  TESSERA_CHECK(args.number(1) == 2, UsageError, "Numerics::Invariant: linalg_vector_norm of order ", args.number(1),
                "; only order 2 has an invariant kernel");
  check_same_dtype(args[4], x, "linalg_vector_norm");
  args.reply(at::sqrt(sum_dims(x * x, dims_or_all(args[2], x), args[3].toBool())));
}

// The dims of x but the last `count`, which a norm takes as one row.
std::vector<int64_t> first_dims(const Tensor& x, size_t count) {
  std::vector<int64_t> dims;
  for (int64_t d = 0; d < x.dim() - static_cast<int64_t>(count); d++) dims.push_back(d);
  return dims;
}

struct NormGradients {
  Tensor dx, dweight, dbias;
};
// Of plain tensors.
NormGradients norm_backward(const Tensor& dy, const Tensor& x, size_t dims, const std::optional<Tensor>& mean,
                            const Tensor& rstd, const std::optional<Tensor>& weight, bool of_input, bool of_weight) {
  const InvariantScopePaused paused;
  const auto [dx, products] =
      row_norm_backward(dy, x, static_cast<int64_t>(dims), mean, rstd, weight, of_input, of_weight);
  NormGradients result;
  if (of_input) result.dx = dx;
  if (of_weight) result.dweight = sum_dims(products, first_dims(x, dims), false);
  return result;
}

void run_layer_norm(Stack* stack, size_t count) {  // input, normalized_shape, weight, bias, eps -> y, mean, rstd
  Arguments args(stack, count);
  const auto dims = static_cast<int64_t>(args[1].toIntVector().size());
  auto [y, mean, rstd] =
      row_norm(args.tensor(0), dims, true, args.optional_tensor(2), args.optional_tensor(3), args.number(4));
  args.reply(y, mean, rstd);
}

void run_layer_norm_backward(
    Stack* stack, size_t count) {  // grad_out, input, normalized_shape, mean, rstd, weight, bias, output_mask
  Arguments args(stack, count);
  const auto dy = args.tensor(0), x = args.tensor(1), mean = args.tensor(3), rstd = args.tensor(4);
  const auto shape = args[2].toIntVector();
  const auto weight = args.optional_tensor(5), bias = args.optional_tensor(6);
  const auto mask = args[7].toBoolList();
  const auto rows = first_dims(x, shape.size());
  NormGradients result;
  if (!is_dtensor(dy) && !is_dtensor(x)) {
    result = norm_backward(dy, x, shape.size(), mean, rstd, weight, mask[0], mask[1]);
  } else {
    if (mask[0])
      result.dx =
          std::get<0>(at::native_layer_norm_backward(dy, x, shape, mean, rstd, weight, bias, {true, false, false}));
    if (mask[1]) result.dweight = sum_dims(dy * ((x - mean) * rstd), rows, false);
  }
  if (mask[2]) result.dbias = sum_dims(dy, rows, false);
  args.reply(result.dx, result.dweight, result.dbias);
}

struct SoftmaxParts {
  Tensor shifted, exponentials, sum;
};
SoftmaxParts softmax_parts(const Tensor& x, int64_t dim) {
  const auto shifted = x - at::amax(x, {dim}, true);
  const auto exponentials = at::exp(shifted);
  return {shifted, exponentials, sum_dims(exponentials, {dim}, true)};
}

void run_softmax(Stack* stack, size_t count) {  // self, dim, half_to_float
  Arguments args(stack, count);
  const auto parts = softmax_parts(args.tensor(0), args[1].toInt());
  args.reply(parts.exponentials / parts.sum);
}

void run_log_softmax(Stack* stack, size_t count) {
  Arguments args(stack, count);
  const auto parts = softmax_parts(args.tensor(0), args[1].toInt());
  args.reply(parts.shifted - at::log(parts.sum));
}

void run_softmax_backward(Stack* stack, size_t count) {  // grad_output, output, dim, input_dtype
  Arguments args(stack, count);
  const auto g = args.tensor(0) * args.tensor(1);
  args.reply(g - args.tensor(1) * sum_dims(g, {args[2].toInt()}, true));
}

void run_log_softmax_backward(Stack* stack, size_t count) {
  Arguments args(stack, count);
  const auto g = args.tensor(0);
  args.reply(g - at::exp(args.tensor(1)) * sum_dims(g, {args[2].toInt()}, true));
}

// rms_norm: y = x * rstd * weight
void run_rms_norm(Stack* stack, size_t count) {  // input, normalized_shape, weight, eps -> y, rstd
  Arguments args(stack, count);
  const auto x = args.tensor(0);
  const double eps = args[3].isNone() ? (x.scalar_type() == at::kDouble ? 0x1p-52 : 0x1p-23) : args.number(3);
  const auto dims = static_cast<int64_t>(args[1].toIntVector().size());
  auto [y, mean, rstd] = row_norm(x, dims, false, args.optional_tensor(2), std::nullopt, eps);
  args.reply(y, rstd);
}

void run_rms_norm_backward(Stack* stack, size_t count) {  // grad_out, input, normalized_shape, rstd, weight, mask
  Arguments args(stack, count);
  const auto dy = args.tensor(0), x = args.tensor(1), rstd = args.tensor(3);
  const auto shape = args[2].toIntVector();
  const auto weight = args.optional_tensor(4);
  const auto mask = args[5].toBoolList();
  NormGradients result;
  if (!is_dtensor(dy) && !is_dtensor(x)) {
    result = norm_backward(dy, x, shape.size(), std::nullopt, rstd, weight, mask[0], mask[1]);
  } else {
    if (mask[0]) result.dx = std::get<0>(at::_fused_rms_norm_backward(dy, x, shape, rstd, weight, {true, false}));
    if (mask[1]) result.dweight = sum_dims(dy * (x * rstd), first_dims(x, shape.size()), false);
  }
  args.reply(result.dx, result.dweight);
}

// ---- negative log likelihood ----

void check_no_class_weights(const Arguments& args, size_t weight) {
  TESSERA_CHECK(!args.optional_tensor(weight), UsageError,
                "Numerics::Invariant: nll_loss with class weights; weight the losses of the samples instead");
}

// Targets beside sharded scores may be plain: every rank has all of them.
Tensor targets_like(const Tensor& scores, const Tensor& target) {
  if (!is_dtensor(scores) || is_dtensor(target)) return target;
  return DTensor::from_local(target, DTensor(scores).device_mesh());
}

void run_nll_loss(Stack* stack, size_t count) {  // self, target, weight, reduction, ignore_index -> loss, total_weight
  Arguments args(stack, count);
  check_no_class_weights(args, 2);
  const auto log_p = args.tensor(0), target = targets_like(log_p, args.tensor(1));
  const auto reduction = args[3].toInt();
  const auto counts = target.ne(args[4].toInt());
  const auto picked = at::gather(log_p, 1, at::where(counts, target, 0).unsqueeze(1)).squeeze(1);
  const auto rows = at::where(counts, -picked, 0.0);
  const auto total = counts.sum().to(log_p.scalar_type());
  if (reduction == at::Reduction::None) return args.reply(rows, total);
  const auto sum = sum_dims(rows, {0}, false);
  args.reply(reduction == at::Reduction::Mean ? sum / total : sum, total);
}

void run_nll_loss_backward(Stack* stack, size_t count) {
  Arguments args(stack, count);  // grad_output, self, target, weight, reduction, ignore_index, total_weight
  check_no_class_weights(args, 3);
  const auto log_p = args.tensor(1), target = targets_like(log_p, args.tensor(2));
  auto g = args.tensor(0);
  if (args[4].toInt() == at::Reduction::Mean) g = g / args.tensor(6);
  const auto rows = at::where(target.ne(args[5].toInt()), -g, 0.0).unsqueeze(1);  // (N, 1)
  const auto classes = at::arange(log_p.size(1), target.options());
  args.reply(at::where(target.unsqueeze(1).eq(classes), rows, 0.0));
}

// ---- attention on local heads ----

struct AttentionCall {
  Tensor query, key, value;  // (batch, heads, positions, features)
  Tensor mask;
  bool causal;
  double scale;

  // `first`: the position of query; `options`: of dropout_p.
  AttentionCall(const Arguments& args, size_t first, size_t options)
      : query(args.tensor(first)), key(args.tensor(first + 1)), value(args.tensor(first + 2)) {
    TESSERA_CHECK(query.size(1) == key.size(1), UsageError, "Numerics::Invariant: attention of ", query.size(1),
                  " heads of queries and ", key.size(1), " of keys; repeat the keys and values of shared heads");
    TESSERA_CHECK(args.number(options) == 0, UsageError, "Numerics::Invariant: attention with dropout ",
                  args.number(options), " draws from a generator that depends on the mesh; use dropout 0");
    causal = args[options + 1].toBool();
    if (const auto given = args.optional_tensor(options + 2)) mask = *given;
    scale = args[options + 3].isNone() ? 1 / std::sqrt(static_cast<double>(query.size(3))) : args.number(options + 3);
  }
  // (batch * heads, positions, features)
  static Tensor flat(const Tensor& x) { return x.reshape({x.size(0) * x.size(1), x.size(2), x.size(3)}); }
  Tensor by_heads(const Tensor& x) const { return x.view({query.size(0), query.size(1), x.size(1), x.size(2)}); }

  // Scaled and masked q k^T.
  Tensor scores() const {
    auto s = product(flat(query), flat(key).transpose(1, 2)) * scale;
    constexpr double kNone = -std::numeric_limits<double>::infinity();
    if (causal) {
      const auto options = query.options().dtype(at::kLong);
      const auto later = at::arange(key.size(2), options).gt(at::arange(query.size(2), options).unsqueeze(1));
      s = at::where(later, at::scalar_tensor(kNone, s.options()), s);
    }
    const auto masked = by_heads(s);
    if (mask.scalar_type() == at::kBool) return flat(at::where(mask, masked, at::scalar_tensor(kNone, s.options())));
    return flat(masked + mask);
  }
};

// Attention without a mask tensor is a kernel of its own.
void run_attention(Stack* stack, size_t count) {
  Arguments args(stack, count);  // query, key, value, dropout_p, is_causal, attn_mask, scale -> output, logsumexp
  const AttentionCall call(args, 0, 3);
  if (!call.mask.defined()) {
    auto [out, logsumexp] = row_attention(call.query, call.key, call.value, call.causal, call.scale);
    return args.reply(out, logsumexp);
  }
  const auto scores = call.scores();
  const auto largest = at::amax(scores, {2}, true);
  const auto exponentials = at::exp(scores - largest);
  const auto sum = sum_dims(exponentials, {2}, true);
  const auto out = product(exponentials / sum, AttentionCall::flat(call.value));
  args.reply(call.by_heads(out), call.by_heads(largest + at::log(sum)).squeeze(3));
}

void run_attention_backward(Stack* stack, size_t count) {
  Arguments args(stack, count);  // grad_out, query, key, value, out, logsumexp, dropout_p, is_causal, attn_mask, scale
  const AttentionCall call(args, 1, 6);
  if (!call.mask.defined()) {
    auto [dq, dk, dv] = row_attention_backward(args.tensor(0), call.query, call.key, call.value, args.tensor(4),
                                               args.tensor(5), call.causal, call.scale);
    return args.reply(dq, dk, dv);
  }
  const auto dy = AttentionCall::flat(args.tensor(0)), out = AttentionCall::flat(args.tensor(4)),
             q = AttentionCall::flat(call.query), k = AttentionCall::flat(call.key),
             v = AttentionCall::flat(call.value);
  const auto p = at::exp(call.scores() - args.tensor(5).reshape({-1, q.size(1), 1}));
  const auto dp = product(dy, v.transpose(1, 2));
  const auto ds = (p * (dp - sum_dims(dy * out, {2}, true))) * call.scale;
  args.reply(call.by_heads(product(ds, k)), call.by_heads(product(ds.transpose(1, 2), q)),
             call.by_heads(product(p.transpose(1, 2), dy)));
}

// ---- fused optimizers ----

// self, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, state_steps, lr, beta1, beta2, weight_decay, eps, amsgrad,
// maximize, grad_scale, found_inf
void run_fused_adam(Stack* stack, size_t count, bool decoupled) {
  Arguments args(stack, count);
  TESSERA_CHECK(
      !args.optional_tensor(13) && !args.optional_tensor(14), UsageError,
      "Numerics::Invariant: fused Adam with a gradient scaler; scalers are for float16, which is not covered");
  const auto name = args[6].isTensor() ? "tensor_lr" : "";
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("tessera::adam_", name);
  Stack call;
  for (size_t i = 0; i < 13; i++) call.push_back(args[i]);
  call.emplace_back(decoupled);
  op.callBoxed(call);
  args.reply();
}
void run_adam(Stack* stack, size_t count) { run_fused_adam(stack, count, false); }
void run_adamw(Stack* stack, size_t count) { run_fused_adam(stack, count, true); }

}  // namespace

bool runs_on_local_tensors(const OpRewrite& rewrite, const Stack& stack, size_t count) {
  if (rewrite.kind != RewriteKind::NormBackward) return rewrite.kind == RewriteKind::Local;
  const auto mask = stack.back().toBoolList();  // the last of the `count` arguments
  return count > 0 && mask[0] && std::none_of(mask.begin() + 1, mask.end(), [](bool wanted) { return wanted; });
}

const std::map<std::string, OpRewrite>& op_rewrites() {
  static const std::map<std::string, OpRewrite> rewrites = {
      {"aten::_fused_adam_", {run_adam, RewriteKind::Local}},
      {"aten::_fused_adam_.tensor_lr", {run_adam, RewriteKind::Local}},
      {"aten::_fused_adamw_", {run_adamw, RewriteKind::Local}},
      {"aten::_fused_adamw_.tensor_lr", {run_adamw, RewriteKind::Local}},
      {"aten::_log_softmax", {run_log_softmax, RewriteKind::Sequence}},
      {"aten::_log_softmax_backward_data", {run_log_softmax_backward, RewriteKind::Sequence}},
      {"aten::_softmax", {run_softmax, RewriteKind::Sequence}},
      {"aten::_softmax_backward_data", {run_softmax_backward, RewriteKind::Sequence}},
      {"aten::addmm", {run_addmm, RewriteKind::Sequence}},
      {"aten::baddbmm", {run_addmm, RewriteKind::Sequence}},
      {"aten::bmm", {run_mm, RewriteKind::Primitive}},
      {"aten::convolution", {run_convolution, RewriteKind::Sequence}},
      {"aten::convolution_backward", {run_convolution_backward, RewriteKind::Sequence}},
      {"aten::embedding_dense_backward", {run_embedding_backward, RewriteKind::Primitive}},
      {"aten::index_add", {run_index_add, RewriteKind::Local}},
      {"aten::index_add_", {run_index_add_in_place, RewriteKind::Local}},
      {"aten::linalg_vector_norm", {run_vector_norm, RewriteKind::Sequence}},
      {"aten::mean", {run_mean, RewriteKind::Sequence}},
      {"aten::mean.dim", {run_mean_dims, RewriteKind::Sequence}},
      {"aten::mm", {run_mm, RewriteKind::Primitive}},
      {"aten::mse_loss", {run_mse_loss, RewriteKind::Sequence}},
      {"aten::mse_loss_backward", {run_mse_loss_backward, RewriteKind::Sequence}},
      {"aten::native_layer_norm", {run_layer_norm, RewriteKind::Local}},
      {"aten::native_layer_norm_backward", {run_layer_norm_backward, RewriteKind::NormBackward}},
      {"aten::_fused_rms_norm", {run_rms_norm, RewriteKind::Local}},
      {"aten::_fused_rms_norm_backward", {run_rms_norm_backward, RewriteKind::NormBackward}},
      {"aten::_scaled_dot_product_flash_attention_for_cpu", {run_attention, RewriteKind::Local}},
      {"aten::_scaled_dot_product_flash_attention_for_cpu_backward", {run_attention_backward, RewriteKind::Local}},
      {"aten::scatter_add", {run_scatter_add, RewriteKind::Local}},
      {"aten::scatter_add_", {run_scatter_add_in_place, RewriteKind::Local}},
      {"aten::nll_loss_backward", {run_nll_loss_backward, RewriteKind::Sequence}},
      {"aten::nll_loss_forward", {run_nll_loss, RewriteKind::Sequence}},
      {"tessera::_scaled_dot_product_flash_attention_for_cpu_backward_or_zeros",
       {run_attention_backward, RewriteKind::Local}},
      {"tessera::_scaled_dot_product_flash_attention_for_cpu_or_zeros", {run_attention, RewriteKind::Local}},
      {"aten::sum", {run_sum, RewriteKind::Primitive}},
      {"aten::sum.dim_IntList", {run_sum_dims, RewriteKind::Primitive}},
  };
  return rewrites;
}

}  // namespace tessera::numerics
