#pragma once
#include "tessera/numerics/detail/vector/cpu_kernels.h"

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

// Kernels of cpu_kernels.h on tensors, on the threads of LibTorch. Bits do not depend on the number of threads.
// Requires: float32 on the CPU, contiguous unless said otherwise, and sizes that fit. UsageError otherwise.
namespace tessera::numerics {

// Throws UsageError unless t has `count` float32 elements on the CPU without gaps. Returns its memory.
float* contiguous_floats(const at::Tensor& t, int64_t count, const char* op);

// out may be x, or gradient.
void vector_gelu(const at::Tensor& out, const at::Tensor& x, bool tanh);
void vector_gelu_backward(const at::Tensor& out, const at::Tensor& gradient, const at::Tensor& x, bool tanh);

// A norm over the elements of a row: y, mean and rstd have one row, or one value, for each. An rms norm has no mean: an
// empty tensor.
void vector_norm(const at::Tensor& y, const at::Tensor& mean, const at::Tensor& rstd, const at::Tensor& x,
                 const std::optional<at::Tensor>& weight, const std::optional<at::Tensor>& bias, double eps);
// dx, and the products whose sum over rows is the gradient of the weight. Either can be empty.
void vector_norm_backward(const at::Tensor& dx, const at::Tensor& products, const at::Tensor& dy, const at::Tensor& x,
                          const at::Tensor& mean, const at::Tensor& rstd, const std::optional<at::Tensor>& weight);

// The same sums over several matrices: matrix i is at x + i * x_stride, its sums are at out + i * out_stride.
struct MatrixStack {
  int64_t count = 1, x_stride = 0, out_stride = 0;
};
// Sums over the rows of matrices, in the order of the steps. The stack of `rows` is not used.
template <class T>
void sum_in_parallel(const SummedRows<T>& rows, const std::vector<SumStep>& steps, const MatrixStack& matrices = {});

// (batch, heads, length, dim), with unit stride in the last dim.
struct AttentionOptions {
  bool causal;
  double scale;
};
void vector_attention(const at::Tensor& out, const at::Tensor& logsumexp, const at::Tensor& query,
                      const at::Tensor& key, const at::Tensor& value, const AttentionOptions& options);
struct AttentionInputs {
  const at::Tensor &gradient, &query, &key, &value, &out, &logsumexp;
};
void vector_attention_backward(const at::Tensor& dquery, const at::Tensor& dkey, const at::Tensor& dvalue,
                               const AttentionInputs& in, const AttentionOptions& options);

}  // namespace tessera::numerics
