#pragma once
#include "tessera/numerics/detail/kernels.h"

#include <tuple>

// The kernels of Numerics::Invariant as registered ops on plain tensors. A tracer records them, and a compiled program
// calls them:
//
//   tessera::tree_product(Tensor a, Tensor b, int[] terms) -> Tensor
//   tessera::tree_sum(Tensor x, int dim, int[] terms) -> Tensor
//   tessera::tree_embedding_gradient(Tensor grad, Tensor indices, int rows, int padding_index, int[] terms) -> Tensor
//   tessera::row_norm(Tensor x, int dims, bool has_mean, Tensor? weight, Tensor? bias, float eps)
//       -> (Tensor y, Tensor mean, Tensor rstd)
//   tessera::row_norm_backward(Tensor dy, Tensor x, int dims, Tensor? mean, Tensor rstd, Tensor? weight,
//       bool of_input, bool of_weight) -> (Tensor dx, Tensor products)
//   tessera::row_attention(Tensor q, Tensor k, Tensor v, bool causal, float scale) -> (Tensor out, Tensor logsumexp)
//   tessera::row_attention_backward(Tensor dy, Tensor q, Tensor k, Tensor v, Tensor out, Tensor logsumexp, bool causal,
//       float scale) -> (Tensor dq, Tensor dk, Tensor dv)
//   tessera::add_at(Tensor self, int dim, Tensor index, Tensor src) -> Tensor
//   tessera::adam_(...)                 arguments of aten::_fused_adam_, and `decoupled`; the overload tensor_lr too
//   tessera::add_disjoint(Tensor all, str what) -> Tensor
//   tessera::elementwise_<op>(...)      arguments of aten::<op> (elementwise.h)
//
// `terms` has the fields of Terms. Tensors of results that were not asked for are empty. Most have an overload `out`
// with the results as arguments.
namespace tessera::numerics {

at::Tensor tree_product(const at::Tensor& a, const at::Tensor& b, const Terms& k);
at::Tensor tree_sum(const at::Tensor& x, int64_t dim, const Terms& terms);
at::Tensor tree_embedding_gradient(const at::Tensor& grad, const at::Tensor& indices, int64_t rows,
                                   int64_t padding_index, const Terms& tokens);

// A norm over the last `dims` dims. An rms norm has no mean. y, mean, rstd; the statistics have size 1 in these dims.
std::tuple<at::Tensor, at::Tensor, at::Tensor> row_norm(const at::Tensor& x, int64_t dims, bool has_mean,
                                                        const std::optional<at::Tensor>& weight,
                                                        const std::optional<at::Tensor>& bias, double eps);
// dx, and the products whose sum over rows is the gradient of the weight.
std::tuple<at::Tensor, at::Tensor> row_norm_backward(const at::Tensor& dy, const at::Tensor& x, int64_t dims,
                                                     const std::optional<at::Tensor>& mean, const at::Tensor& rstd,
                                                     const std::optional<at::Tensor>& weight, bool of_input,
                                                     bool of_weight);

// Attention without a mask tensor, on (batch, heads, positions, features): the result, and the logarithm of the sum of
// exp(score) of each query.
std::tuple<at::Tensor, at::Tensor> row_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                                 bool causal, double scale);
std::tuple<at::Tensor, at::Tensor, at::Tensor> row_attention_backward(const at::Tensor& dy, const at::Tensor& q,
                                                                      const at::Tensor& k, const at::Tensor& v,
                                                                      const at::Tensor& out,
                                                                      const at::Tensor& logsumexp, bool causal,
                                                                      double scale);

// self[index[i]] + src[i] along dim: the elements of src are added in ascending order (torch.scatter_add).
at::Tensor add_at(const at::Tensor& self, int64_t dim, const at::Tensor& index, const at::Tensor& src);

// The sum over dim 0, of which at most one row is nonzero in each element: exact, also for -0. Throws UsageError if
// several are; `what` sums them.
at::Tensor add_disjoint(const at::Tensor& all, const std::string& what);

}  // namespace tessera::numerics
