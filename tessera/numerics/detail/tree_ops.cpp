#include "tessera/numerics/detail/tree_ops.h"

#include "tessera/base/error.h"
#include "tessera/numerics/detail/elementwise.h"
#include "tessera/numerics/detail/row_kernels.h"
#include "tessera/numerics/detail/vector/vector_ops.h"
#include "tessera/tracing/op_mode.h"

#include <ATen/Dispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/log.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>

namespace tessera::numerics {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

// ---- terms as integers ----

std::vector<int64_t> integers_of(const Terms& t) {
  return {t.terms, t.owned.begin, t.owned.end, t.shards.begin, t.shards.end, t.shard_count};
}
Terms terms_from(at::IntArrayRef t) {
  TESSERA_CHECK(t.size() == 6, UsageError, "the order of a sum is 6 integers; found ", t);
  return {t[0], {t[1], t[2]}, {t[3], t[4]}, t[5]};
}

// ---- sums ----

Tensor tree_product_kernel(const Tensor& a, const Tensor& b, at::IntArrayRef terms) {
  return product_subtrees(a, b, terms_from(terms));
}
Tensor& tree_product_out_kernel(const Tensor& a, const Tensor& b, at::IntArrayRef terms, Tensor& out) {
  product_subtrees_into(out, a, b, terms_from(terms));
  return out;
}
Tensor tree_sum_kernel(const Tensor& x, int64_t dim, at::IntArrayRef terms) {
  return sum_subtrees(x, dim, terms_from(terms));
}
Tensor& tree_sum_out_kernel(const Tensor& x, int64_t dim, at::IntArrayRef terms, Tensor& out) {
  sum_subtrees_into(out, x, dim, terms_from(terms));
  return out;
}
Tensor tree_embedding_gradient_kernel(const Tensor& grad, const Tensor& indices, int64_t rows, int64_t padding_index,
                                      at::IntArrayRef terms) {
  return embedding_gradient_subtrees(grad, indices, rows, padding_index, terms_from(terms));
}

Tensor add_disjoint_kernel(const Tensor& all, std::string what) {
  const auto bits = all.view(all.element_size() == 8 ? at::kLong : all.element_size() == 4 ? at::kInt : at::kShort);
  TESSERA_CHECK(
      bits.ne(0).sum(0).le(1).all().item<bool>(), UsageError, "Numerics::Invariant: ", what,
      " sums values of several ranks. Its bits depend on the number of ranks. Reduce gradients by "
      "VirtualShards, let an op on DTensors compute other sums, or call the collective outside of the scope.");
  return bits.sum(0, false, bits.scalar_type()).view(all.scalar_type());  // keeps -0
}

Tensor add_at_kernel(const Tensor& self, int64_t dim, const Tensor& index_, const Tensor& src_) {
  check_dtype(self, "a sum by index");
  auto out = self.clone(at::MemoryFormat::Contiguous);
  const auto index = index_.contiguous();
  if (index.numel() == 0) return out;
  TESSERA_CHECK(index.scalar_type() == at::kLong && index.dim() == self.dim(), UsageError,
                "Numerics::Invariant: a sum by an index of ", index.scalar_type(), " and sizes ", index.sizes(),
                " into a tensor of sizes ", self.sizes());
  const int64_t dims = self.dim(), terms = dims == 0 ? 1 : index.size(dim);
  const int64_t stride = dims == 0 ? 1 : out.stride(dim), rows = dims == 0 ? 1 : self.size(dim);
  int64_t inner = 1;
  auto src = src_;
  for (int64_t d = 0; d < dims; d++) {
    inner *= d > dim ? index.size(d) : 1;
    src = src.narrow(d, 0, index.size(d));  // of scatter_add it may be larger
  }
  src = src.contiguous();
  AT_DISPATCH_FLOATING_TYPES(self.scalar_type(), "add_at", [&] {
    auto* to = out.data_ptr<scalar_t>();
    const auto* from = src.const_data_ptr<scalar_t>();
    const auto* at = index.const_data_ptr<int64_t>();
    const int64_t outer = index.numel() / (inner * terms);
    for (int64_t o = 0; o < outer; o++)
      for (int64_t i = 0; i < terms; i++)
        for (int64_t j = 0; j < inner; j++) {
          const int64_t place = (o * terms + i) * inner + j;
          TESSERA_CHECK(at[place] >= 0 && at[place] < rows, UsageError, "index ", at[place], " of a dim of size ",
                        rows);
          // The element of the result in the other dims: index may be smaller there.
          int64_t offset = at[place] * stride;
          for (int64_t d = dims - 1, rest = j; d > dim; rest /= index.size(d), d--)
            offset += rest % index.size(d) * out.stride(d);
          for (int64_t d = dim - 1, rest = o; d >= 0; rest /= index.size(d), d--)
            offset += rest % index.size(d) * out.stride(d);
          to[offset] += from[place];
        }
  });
  return out;
}

// ---- norms ----

// Elements of the last `dims` dims.
int64_t row_length(const Tensor& x, int64_t dims) {
  int64_t n = 1;
  for (int64_t d = x.dim() - dims; d < x.dim(); d++) n *= x.size(d);
  return n;
}
// One value per row.
std::vector<int64_t> statistics_sizes(const Tensor& x, int64_t dims) {
  auto sizes = x.sizes().vec();
  std::fill(sizes.end() - dims, sizes.end(), 1);
  return sizes;
}
Tensor nothing(const Tensor& like) { return at::empty({0}, like.options()); }

OptionalTensor contiguous_or_none(const OptionalTensor& t) {
  return t && t->defined() ? OptionalTensor(t->contiguous()) : std::nullopt;
}
bool is_float(const Tensor& t) { return t.scalar_type() == at::kFloat; }
const double* doubles_or_null(const OptionalTensor& t) { return t ? t->const_data_ptr<double>() : nullptr; }
// Results in float64 are computed into new memory and copied.
Tensor doubles_like(const Tensor& wanted, const Tensor& x, at::IntArrayRef sizes) {
  return wanted.numel() > 0 ? at::empty(sizes, x.options()) : Tensor();
}
double* memory_or_null(const Tensor& t) { return t.defined() ? t.data_ptr<double>() : nullptr; }
void copy_if_wanted(const Tensor& wanted, const Tensor& found) {
  if (found.defined()) wanted.copy_(found);
}
void check_operand(const OptionalTensor& t, int64_t n, const Tensor& x) {
  TESSERA_CHECK(!t || (t->numel() == n && t->scalar_type() == x.scalar_type() && t->is_cpu()), UsageError,
                "Numerics::Invariant: a norm of ", x.sizes(), " in ", x.scalar_type(), " with an operand of ",
                t->sizes(), " in ", t->scalar_type(), ", which must have ", n, " elements of the same type");
}

void row_norm_into(const Tensor& input, int64_t dims, const OptionalTensor& weight_, const OptionalTensor& bias_,
                   double eps, const Tensor& y, const Tensor& mean, const Tensor& rstd) {
  check_dtype(input, "a norm");
  const auto x = input.contiguous();
  const auto weight = contiguous_or_none(weight_), bias = contiguous_or_none(bias_);
  check_operand(weight, row_length(x, dims), x);
  check_operand(bias, row_length(x, dims), x);
  if (is_float(x)) return vector_norm(y, mean, rstd, x, weight, bias, eps);
  const auto sizes = statistics_sizes(x, dims);
  const auto to = doubles_like(y, x, x.sizes()), to_mean = doubles_like(mean, x, sizes),
             to_rstd = doubles_like(rstd, x, sizes);
  if (!to.defined()) return;
  norm_rows(x.const_data_ptr<double>(), to_rstd.numel(), row_steps(row_length(x, dims)), doubles_or_null(weight),
            doubles_or_null(bias), eps, to.data_ptr<double>(), memory_or_null(to_mean), memory_or_null(to_rstd));
  for (const auto& [wanted, found] : {std::pair(y, to), {mean, to_mean}, {rstd, to_rstd}})
    copy_if_wanted(wanted, found);
}
std::tuple<Tensor, Tensor, Tensor> row_norm_kernel(const Tensor& x, int64_t dims, bool has_mean,
                                                   const OptionalTensor& weight, const OptionalTensor& bias,
                                                   double eps) {
  const auto sizes = statistics_sizes(x, dims);
  const auto y = at::empty(x.sizes(), x.options()), rstd = at::empty(sizes, x.options());
  const auto mean = has_mean ? at::empty(sizes, x.options()) : nothing(x);
  row_norm_into(x, dims, weight, bias, eps, y, mean, rstd);
  return {y, mean, rstd};
}
std::tuple<Tensor&, Tensor&, Tensor&> row_norm_out_kernel(const Tensor& x, int64_t dims, bool /*has_mean*/,
                                                          const OptionalTensor& weight, const OptionalTensor& bias,
                                                          double eps, Tensor& y, Tensor& mean, Tensor& rstd) {
  row_norm_into(x, dims, weight, bias, eps, y, mean, rstd);
  return {y, mean, rstd};
}

void row_norm_backward_into(const Tensor& dy_, const Tensor& x_, int64_t dims, const OptionalTensor& mean_,
                            const Tensor& rstd_, const OptionalTensor& weight_, const Tensor& dx,
                            const Tensor& products) {
  check_dtype(x_, "a norm");
  const auto dy = dy_.contiguous(), x = x_.contiguous(), rstd = rstd_.contiguous();
  const auto mean = contiguous_or_none(mean_), weight = contiguous_or_none(weight_);
  const int64_t n = row_length(x, dims), rows = n == 0 ? 0 : x.numel() / n;
  check_operand(weight, n, x);
  check_operand(rstd, rows, x);
  check_operand(mean, rows, x);
  check_operand(dy, x.numel(), x);
  if (is_float(x)) return vector_norm_backward(dx, products, dy, x, mean.value_or(Tensor()), rstd, weight);
  const auto to = doubles_like(dx, x, x.sizes()), to_products = doubles_like(products, x, x.sizes());
  norm_backward_rows(dy.const_data_ptr<double>(), x.const_data_ptr<double>(), rows, row_steps(n),
                     doubles_or_null(weight), doubles_or_null(mean), rstd.const_data_ptr<double>(), memory_or_null(to),
                     memory_or_null(to_products));
  copy_if_wanted(dx, to);
  copy_if_wanted(products, to_products);
}
std::tuple<Tensor, Tensor> row_norm_backward_kernel(const Tensor& dy, const Tensor& x, int64_t dims,
                                                    const OptionalTensor& mean, const Tensor& rstd,
                                                    const OptionalTensor& weight, bool of_input, bool of_weight) {
  const auto dx = of_input ? at::empty(x.sizes(), x.options()) : nothing(x);
  const auto products = of_weight ? at::empty(x.sizes(), x.options()) : nothing(x);
  row_norm_backward_into(dy, x, dims, mean, rstd, weight, dx, products);
  return {dx, products};
}
std::tuple<Tensor&, Tensor&> row_norm_backward_out_kernel(const Tensor& dy, const Tensor& x, int64_t dims,
                                                          const OptionalTensor& mean, const Tensor& rstd,
                                                          const OptionalTensor& weight, bool /*of_input*/,
                                                          bool /*of_weight*/, Tensor& dx, Tensor& products) {
  row_norm_backward_into(dy, x, dims, mean, rstd, weight, dx, products);
  return {dx, products};
}

// ---- attention ----

Tensor product_of(const Tensor& a, const Tensor& b) {
  return product_subtrees(a, b, all_terms(a.size(2))).select(0, 0);
}

// exp(x), in place.
void exp_in_place(const Tensor& x) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::exp_", "");
  torch::jit::Stack stack = {x};
  run_elementwise(op, &stack);
}

Tensor flat_heads(const Tensor& x) { return x.reshape({x.size(0) * x.size(1), x.size(2), x.size(3)}); }
// (batch, heads, positions, features), in the memory order of LibTorch's attention.
Tensor empty_heads(const Tensor& like, int64_t positions) {
  return at::empty({like.size(0), positions, like.size(1), like.size(3)}, like.options()).transpose(1, 2);
}
Tensor with_dense_rows(const Tensor& x) { return x.stride(3) == 1 ? x : x.contiguous(); }

void attention_of_doubles(const Tensor& q, const Tensor& k, const Tensor& v, bool causal, double scale,
                          const Tensor& out, const Tensor& logsumexp) {
  const auto p = product_of(flat_heads(q), flat_heads(k).transpose(1, 2));
  const std::vector<int64_t> sizes = {p.size(0), p.size(1)};
  const auto largest = at::empty(sizes, p.options()), sums = at::empty(sizes, p.options());
  shift_scores(p.data_ptr<double>(), largest.numel(), p.size(2), p.size(1), scale, causal, largest.data_ptr<double>(),
               nullptr);
  exp_in_place(p);
  divide_by_sums(p.data_ptr<double>(), largest.numel(), row_steps(p.size(2)), sums.data_ptr<double>());
  out.copy_(product_of(p, flat_heads(v)).view(out.sizes()));
  logsumexp.copy_((largest + at::log(sums)).view(logsumexp.sizes()));
}
void row_attention_into(const Tensor& q, const Tensor& k, const Tensor& v, bool causal, double scale, const Tensor& out,
                        const Tensor& logsumexp) {
  check_dtype(q, "attention");
  if (!is_float(q)) return attention_of_doubles(q, k, v, causal, scale, out, logsumexp);
  vector_attention(out, logsumexp, with_dense_rows(q), with_dense_rows(k), with_dense_rows(v), {causal, scale});
}
std::tuple<Tensor, Tensor> row_attention_kernel(const Tensor& q, const Tensor& k, const Tensor& v, bool causal,
                                                double scale) {
  const auto out = empty_heads(q, q.size(2));
  const auto logsumexp = at::empty({q.size(0), q.size(1), q.size(2)}, q.options());
  row_attention_into(q, k, v, causal, scale, out, logsumexp);
  return {out, logsumexp};
}
std::tuple<Tensor&, Tensor&> row_attention_out_kernel(const Tensor& q, const Tensor& k, const Tensor& v, bool causal,
                                                      double scale, Tensor& out, Tensor& logsumexp) {
  row_attention_into(q, k, v, causal, scale, out, logsumexp);
  return {out, logsumexp};
}

void attention_backward_of_doubles(const AttentionInputs& in, bool causal, double scale, const Tensor& dq,
                                   const Tensor& dk, const Tensor& dv) {
  const auto q = flat_heads(in.query), k = flat_heads(in.key), v = flat_heads(in.value), dy = flat_heads(in.gradient);
  const auto p = product_of(q, k.transpose(1, 2));
  const auto logsumexp = in.logsumexp.contiguous();
  const auto delta = sum_subtrees(dy * flat_heads(in.out), 2, all_terms(dy.size(2))).select(0, 0);
  const auto ds = product_of(dy, v.transpose(1, 2));
  shift_scores(p.data_ptr<double>(), delta.numel(), p.size(2), p.size(1), scale, causal, nullptr,
               logsumexp.const_data_ptr<double>());
  exp_in_place(p);
  score_gradients(p.const_data_ptr<double>(), ds.data_ptr<double>(), delta.numel(), p.size(2),
                  delta.const_data_ptr<double>(), scale);
  dq.copy_(product_of(ds, k).view(dq.sizes()));
  dk.copy_(product_of(ds.transpose(1, 2), q).view(dk.sizes()));
  dv.copy_(product_of(p.transpose(1, 2), dy).view(dv.sizes()));
}
void row_attention_backward_into(const AttentionInputs& in, bool causal, double scale, const Tensor& dq,
                                 const Tensor& dk, const Tensor& dv) {
  check_dtype(in.query, "attention");
  if (!is_float(in.query)) return attention_backward_of_doubles(in, causal, scale, dq, dk, dv);
  const auto dy = with_dense_rows(in.gradient), q = with_dense_rows(in.query), k = with_dense_rows(in.key),
             v = with_dense_rows(in.value), out = with_dense_rows(in.out);
  vector_attention_backward(dq, dk, dv, {dy, q, k, v, out, in.logsumexp}, {causal, scale});
}
std::tuple<Tensor, Tensor, Tensor> row_attention_backward_kernel(const Tensor& dy, const Tensor& q, const Tensor& k,
                                                                 const Tensor& v, const Tensor& out,
                                                                 const Tensor& logsumexp, bool causal, double scale) {
  const auto dq = empty_heads(q, q.size(2)), dk = empty_heads(k, k.size(2)), dv = empty_heads(v, v.size(2));
  row_attention_backward_into({dy, q, k, v, out, logsumexp}, causal, scale, dq, dk, dv);
  return {dq, dk, dv};
}
std::tuple<Tensor&, Tensor&, Tensor&> row_attention_backward_out_kernel(const Tensor& dy, const Tensor& q,
                                                                        const Tensor& k, const Tensor& v,
                                                                        const Tensor& out, const Tensor& logsumexp,
                                                                        bool causal, double scale, Tensor& dq,
                                                                        Tensor& dk, Tensor& dv) {
  row_attention_backward_into({dy, q, k, v, out, logsumexp}, causal, scale, dq, dk, dv);
  return {dq, dk, dv};
}

// ---- fused optimizers ----

void adam_kernel(at::TensorList parameters, at::TensorList gradients, at::TensorList exp_avgs,
                 at::TensorList exp_avg_sqs, at::TensorList largest, at::TensorList steps, double lr, double beta1,
                 double beta2, double decay, double eps, bool amsgrad, bool maximize, bool decoupled) {
  for (size_t i = 0; i < parameters.size(); i++) {
    const auto& p = parameters[i];
    check_dtype(p, "fused Adam");
    const auto strides = p.strides();
    for (const auto* t : {&gradients[i], &exp_avgs[i], &exp_avg_sqs[i]})
      TESSERA_CHECK(t->strides() == strides && t->is_non_overlapping_and_dense(), UsageError,
                    "Numerics::Invariant: fused Adam of a parameter with strides ", strides,
                    " and a gradient or state ", "with strides ", t->strides(), "; use .foreach = true");
    const double t = steps[i].item<double>();
    const AdamStep step{.weight_factor = decoupled ? 1 - lr * decay : 1,
                        .l2 = decoupled ? 0 : decay,
                        .beta1 = beta1,
                        .beta2 = beta2,
                        .eps = eps,
                        .step_size = lr / (1 - std::pow(beta1, t)),
                        .root_of_correction2 = std::sqrt(1 - std::pow(beta2, t)),
                        .maximize = maximize};
    AT_DISPATCH_FLOATING_TYPES(p.scalar_type(), "fused_adam", [&] {
      adam_elements<scalar_t>(step, p.numel(), p.data_ptr<scalar_t>(), gradients[i].const_data_ptr<scalar_t>(),
                              exp_avgs[i].data_ptr<scalar_t>(), exp_avg_sqs[i].data_ptr<scalar_t>(),
                              amsgrad ? largest[i].data_ptr<scalar_t>() : nullptr);
    });
  }
}
void adam_tensor_lr_kernel(at::TensorList parameters, at::TensorList gradients, at::TensorList exp_avgs,
                           at::TensorList exp_avg_sqs, at::TensorList largest, at::TensorList steps, const Tensor& lr,
                           double beta1, double beta2, double decay, double eps, bool amsgrad, bool maximize,
                           bool decoupled) {
  adam_kernel(parameters, gradients, exp_avgs, exp_avg_sqs, largest, steps, lr.item<double>(), beta1, beta2, decay, eps,
              amsgrad, maximize, decoupled);
}

// A kernel of this file, through the dispatcher.
template <class Kernel>
auto dispatched(const char* name, Kernel* /*kernel*/) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Kernel>();
}

}  // namespace

Tensor tree_product(const Tensor& a, const Tensor& b, const Terms& k) {
  static const auto op = dispatched("tessera::tree_product", tree_product_kernel);
  return op.call(a, b, integers_of(k));
}
Tensor tree_sum(const Tensor& x, int64_t dim, const Terms& terms) {
  static const auto op = dispatched("tessera::tree_sum", tree_sum_kernel);
  return op.call(x, dim, integers_of(terms));
}
Tensor tree_embedding_gradient(const Tensor& grad, const Tensor& indices, int64_t rows, int64_t padding_index,
                               const Terms& tokens) {
  static const auto op = dispatched("tessera::tree_embedding_gradient", tree_embedding_gradient_kernel);
  return op.call(grad, indices, rows, padding_index, integers_of(tokens));
}
std::tuple<Tensor, Tensor, Tensor> row_norm(const Tensor& x, int64_t dims, bool has_mean, const OptionalTensor& weight,
                                            const OptionalTensor& bias, double eps) {
  static const auto op = dispatched("tessera::row_norm", row_norm_kernel);
  return op.call(x, dims, has_mean, weight, bias, eps);
}
std::tuple<Tensor, Tensor> row_norm_backward(const Tensor& dy, const Tensor& x, int64_t dims,
                                             const OptionalTensor& mean, const Tensor& rstd,
                                             const OptionalTensor& weight, bool of_input, bool of_weight) {
  static const auto op = dispatched("tessera::row_norm_backward", row_norm_backward_kernel);
  return op.call(dy, x, dims, mean, rstd, weight, of_input, of_weight);
}
std::tuple<Tensor, Tensor> row_attention(const Tensor& q, const Tensor& k, const Tensor& v, bool causal, double scale) {
  static const auto op = dispatched("tessera::row_attention", row_attention_kernel);
  return op.call(q, k, v, causal, scale);
}
std::tuple<Tensor, Tensor, Tensor> row_attention_backward(const Tensor& dy, const Tensor& q, const Tensor& k,
                                                          const Tensor& v, const Tensor& out, const Tensor& logsumexp,
                                                          bool causal, double scale) {
  static const auto op = dispatched("tessera::row_attention_backward", row_attention_backward_kernel);
  return op.call(dy, q, k, v, out, logsumexp, causal, scale);
}
Tensor add_at(const Tensor& self, int64_t dim, const Tensor& index, const Tensor& src) {
  static const auto op = dispatched("tessera::add_at", add_at_kernel);
  return op.call(self, dim, index, src);
}
Tensor add_disjoint(const Tensor& all, const std::string& what) {
  static const auto op = dispatched("tessera::add_disjoint", add_disjoint_kernel);
  return op.call(all, what);
}

TORCH_LIBRARY_FRAGMENT(tessera, m) {
  m.def("tree_product(Tensor a, Tensor b, int[] terms) -> Tensor");
  m.def("tree_product.out(Tensor a, Tensor b, int[] terms, *, Tensor(a!) out) -> Tensor(a!)");
  m.def("tree_sum(Tensor x, int dim, int[] terms) -> Tensor");
  m.def("tree_sum.out(Tensor x, int dim, int[] terms, *, Tensor(a!) out) -> Tensor(a!)");
  m.def("tree_embedding_gradient(Tensor grad, Tensor indices, int rows, int padding_index, int[] terms) -> Tensor");
#define TESSERA_ROW_NORM "(Tensor x, int dims, bool has_mean, Tensor? weight, Tensor? bias, float eps"
  m.def("row_norm" TESSERA_ROW_NORM ") -> (Tensor, Tensor, Tensor)");
  m.def("row_norm.out" TESSERA_ROW_NORM
        ", *, Tensor(a!) y, Tensor(b!) mean, Tensor(c!) rstd) -> (Tensor(a!), Tensor(b!), Tensor(c!))");
#undef TESSERA_ROW_NORM
#define TESSERA_ROW_NORM_BACKWARD \
  "(Tensor dy, Tensor x, int dims, Tensor? mean, Tensor rstd, Tensor? weight, bool of_input, bool of_weight"
  m.def("row_norm_backward" TESSERA_ROW_NORM_BACKWARD ") -> (Tensor, Tensor)");
  m.def("row_norm_backward.out" TESSERA_ROW_NORM_BACKWARD
        ", *, Tensor(a!) dx, Tensor(b!) products) -> (Tensor(a!), Tensor(b!))");
#undef TESSERA_ROW_NORM_BACKWARD
#define TESSERA_ROW_ATTENTION "(Tensor q, Tensor k, Tensor v, bool causal, float scale"
  m.def("row_attention" TESSERA_ROW_ATTENTION ") -> (Tensor, Tensor)");
  m.def("row_attention.out" TESSERA_ROW_ATTENTION
        ", *, Tensor(a!) out, Tensor(b!) logsumexp) -> (Tensor(a!), Tensor(b!))");
#undef TESSERA_ROW_ATTENTION
#define TESSERA_ROW_ATTENTION_BACKWARD \
  "(Tensor dy, Tensor q, Tensor k, Tensor v, Tensor out, Tensor logsumexp, bool causal, float scale"
  m.def("row_attention_backward" TESSERA_ROW_ATTENTION_BACKWARD ") -> (Tensor, Tensor, Tensor)");
  m.def("row_attention_backward.out" TESSERA_ROW_ATTENTION_BACKWARD
        ", *, Tensor(a!) dq, Tensor(b!) dk, Tensor(c!) dv) -> (Tensor(a!), Tensor(b!), Tensor(c!))");
#undef TESSERA_ROW_ATTENTION_BACKWARD
#define TESSERA_ADAM_LISTS                                                                             \
  "(Tensor(a!)[] self, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, Tensor(d!)[] " \
  "max_exp_avg_sqs, Tensor[] state_steps, "
#define TESSERA_ADAM_NUMBERS                                                                                  \
  " lr, float beta1, float beta2, float weight_decay, float eps, bool amsgrad, bool maximize, bool decoupled" \
  ") -> ()"
  m.def("adam_" TESSERA_ADAM_LISTS "float" TESSERA_ADAM_NUMBERS);
  m.def("adam_.tensor_lr" TESSERA_ADAM_LISTS "Tensor" TESSERA_ADAM_NUMBERS);
#undef TESSERA_ADAM_LISTS
#undef TESSERA_ADAM_NUMBERS
  m.def("add_at(Tensor self, int dim, Tensor index, Tensor src) -> Tensor");
  m.def("add_disjoint(Tensor all, str what) -> Tensor");
}

// A compiled program calls these on memory that it plans.
TORCH_LIBRARY_IMPL(tessera, CPU, m) {
  m.impl("tree_product.out", tree_product_out_kernel);
  m.impl("tree_sum.out", tree_sum_out_kernel);
  m.impl("row_norm.out", row_norm_out_kernel);
  m.impl("row_norm_backward.out", row_norm_backward_out_kernel);
  m.impl("row_attention.out", row_attention_out_kernel);
  m.impl("row_attention_backward.out", row_attention_backward_out_kernel);
}

TORCH_LIBRARY_IMPL(tessera, CompositeExplicitAutograd, m) {
  m.impl("tree_product", tree_product_kernel);
  m.impl("tree_sum", tree_sum_kernel);
  m.impl("tree_embedding_gradient", tree_embedding_gradient_kernel);
  m.impl("row_norm", row_norm_kernel);
  m.impl("row_norm_backward", row_norm_backward_kernel);
  m.impl("row_attention", row_attention_kernel);
  m.impl("row_attention_backward", row_attention_backward_kernel);
  m.impl("adam_", adam_kernel);
  m.impl("adam_.tensor_lr", adam_tensor_lr_kernel);
  m.impl("add_at", add_at_kernel);
  m.impl("add_disjoint", add_disjoint_kernel);
}

}  // namespace tessera::numerics
