#pragma once
#include "tessera/numerics/detail/sum_step.h"

#include <cstdint>

// Kernels in float32 for the CPU, and matrix products in float64: those of compiled steps with Numerics::Fast, and of
// Numerics::Invariant. vector_kernels.inc has their source, for vectors of any length. It is compiled once per kind of
// processor, and cpu_kernels() chooses. These files include no other header: a function that they would instantiate
// could be linked into code for other processors.
//
// A kernel computes a part of its result, so that the caller can use several threads. The bits of a result do not
// depend on the parts, nor on the processor, if that has fused multiply-add.
namespace tessera::numerics {

// A matrix in memory: element (i, j) is at i * row + j * column. One of the two strides is 1.
template <class T>
struct StridedMatrix {
  T* data;
  int64_t row, column;
};

// What is done with a tile of a product while it is in the cache.
enum class ProductEpilogue : uint8_t {
  None,
  Gelu,              // result = gelu(out)
  GeluTanh,          // the same with approximate = "tanh"
  GeluBackward,      // out *= derivative of gelu at `operand`
  GeluTanhBackward,  // the same with approximate = "tanh"
};

// What a product of causal attention leaves out, tile by tile: query l attends to keys 0 to l + diagonal.
enum class ProductTriangle : uint8_t {
  None,
  Columns,  // element (i, j) of the result is not needed if j > i + diagonal
  Above,    // element (i, l) of a is 0 if l > i + diagonal
  Below,    // element (i, l) of a is 0 if i > l + diagonal
};

// out (m, n) = a (m, k) @ b (k, n) + bias (n), then the epilogue.
template <class T>
struct ProductOperands {
  int64_t m, n, k;
  StridedMatrix<const T> a, b;
  StridedMatrix<T> out;     // by rows
  bool adds = false;        // out += a @ b; without steps
  const T* bias = nullptr;  // may be null
  ProductEpilogue epilogue = ProductEpilogue::None;
  StridedMatrix<const T> operand = {};               // of the epilogue, (m, n) by rows
  StridedMatrix<T> result = {};                      // of the epilogue, (m, n) by rows
  ProductTriangle triangle = ProductTriangle::None;  // without steps
  int64_t diagonal = 0;
  // The order of the sums over k; a step has at most kProductBlock terms. Null: blocks of kProductBlock terms are added
  // one after the other. Subtree number s goes to out + s * subtree_stride. If there are several, neither bias nor
  // epilogue.
  const SumStep* steps = nullptr;
  int64_t step_count = 0;
  int64_t stack = 0;  // stack_depth(steps)
  int64_t subtree_stride = 0;
  T* scratch = nullptr;  // CpuKernels::product_scratch elements; without steps may be null, which is slower
};
constexpr int64_t kProductBlock = 256;

// A matrix of float32 or bfloat16, as StridedMatrix. float32 is rounded to bfloat16 where it is read.
struct Bfloat16Operand {
  const void* data;
  int64_t row, column;
  bool is_float;
};
// out (m, n) = a (m, k) @ b (k, n) + bias (n), then the epilogue: products of bfloat16, sums in float32.
struct Bfloat16Product {
  int64_t m, n, k;
  Bfloat16Operand a, b;
  StridedMatrix<float> out;  // by rows
  const float* bias = nullptr;
  ProductEpilogue epilogue = ProductEpilogue::None;
  StridedMatrix<const float> operand = {};  // of the epilogue, (m, n) by rows
  StridedMatrix<float> result = {};         // of the epilogue, (m, n) by rows
};

// One head of attention: out = softmax(scale * query @ key^T) @ value. Matrices are by rows, with `dim` columns.
struct AttentionHead {
  int64_t queries, keys, dim;
  StridedMatrix<const float> query, key, value;
  StridedMatrix<float> out;
  float* logsumexp;  // of the scores, one per query
  int64_t logsumexp_stride;
  float scale;
  bool causal;  // query i attends to keys 0 to i
};
struct AttentionGradients {
  StridedMatrix<const float> out;
  StridedMatrix<float> query, key, value;
};

// y = (x - mean) * rstd * weight + bias,  rstd = 1 / sqrt(mean of squares + eps). weight and bias may be null. An rms
// norm has no mean: null.
struct LayerNormRows {
  int64_t columns;
  const float *x, *weight, *bias;
  float *out, *mean, *rstd;
  float eps;
};
// dx = rstd * (g - mean(g) - xhat * mean(g * xhat)),  g = gradient * weight,  xhat = (x - mean) * rstd. An rms norm has
// no term mean(g).
struct LayerNormGradients {
  int64_t columns;
  const float *gradient, *x, *mean, *rstd, *weight;
  float* dx;                  // may be null
  bool adds;                  // dx += the gradient of x
  float* products = nullptr;  // gradient * xhat, whose sum over rows is the gradient of the weight; may be null
};

// Neighbours that are summed over the rows of a matrix with `columns` columns: row i is at x + i * stride. Subtree s is
// stored at out + s * subtree_stride.
template <class T>
struct SummedRows {
  const T* x;
  int64_t stride, columns;
  T* out;
  int64_t subtree_stride;
  T* stack;  // stack_depth(steps) * columns elements
};

struct CpuKernels {
  const char* name;         // "avx512_bf16", "avx512", "avx2" or "baseline"
  int64_t product_columns;  // the first column of a part of a product is a multiple of this
  int64_t queries;          // a part of attention has this many queries: the first is a multiple of this
  // Rows [row, row_end) and columns [column, column_end). In a step, terms are added in the order of k, each rounded
  // once (twice without fused multiply-add). So the bits of an element depend on its row of a, its column of b and the
  // steps alone.
  void (*multiply)(const ProductOperands<float>& product, int64_t row, int64_t row_end, int64_t column,
                   int64_t column_end);
  void (*multiply_doubles)(const ProductOperands<double>& product, int64_t row, int64_t row_end, int64_t column,
                           int64_t column_end);
  // Elements of scratch for a part with so many rows and columns.
  int64_t (*product_scratch)(const ProductOperands<float>& product, int64_t rows, int64_t columns);
  int64_t (*product_scratch_doubles)(const ProductOperands<double>& product, int64_t rows, int64_t columns);
  // Within 1e-6 of the exact values for |x| < 10. out may be x, or gradient.
  void (*gelu)(const float* x, float* out, int64_t count, bool tanh);
  void (*gelu_backward)(const float* gradient, const float* x, float* out, int64_t count, bool tanh);
  // scratch: queries * (keys + product_columns) floats, twice as many for backward.
  void (*attention)(const AttentionHead& head, int64_t first_query, int64_t end, float* scratch);
  void (*attention_backward)(const AttentionHead& head, const AttentionGradients& gradients, float* scratch);
  // Rows [first, end).
  void (*layer_norm)(const LayerNormRows& rows, int64_t first, int64_t end);
  // Adds what these rows contribute to dweight and dbias, which may be null.
  void (*layer_norm_backward)(const LayerNormGradients& rows, int64_t first, int64_t end, float* dweight, float* dbias);
  // Sums over rows in the order of the steps.
  void (*sum_tree)(const SummedRows<float>& rows, const SumStep* steps, int64_t step_count);
  void (*sum_tree_doubles)(const SummedRows<double>& rows, const SumStep* steps, int64_t step_count);
  // The logarithm of the sum of exp(x[i]).
  float (*log_sum_exp)(const float* x, int64_t count);
  // out[i] = factor * exp(x[i] - shift). out may be x.
  void (*scaled_exponential)(const float* x, float* out, int64_t count, float shift, float factor);
  // As multiply. Null if the processor has no instructions for bfloat16. scratch: bfloat16_scratch floats.
  void (*multiply_bfloat16)(const Bfloat16Product& product, int64_t row, int64_t row_end, int64_t column,
                            int64_t column_end, float* scratch) = nullptr;
  int64_t bfloat16_scratch = 0;
};

// The fastest kernels that this processor can run.
const CpuKernels& cpu_kernels();

// All that it can run, the fastest first; the others are null. For tests.
struct AllCpuKernels {
  const CpuKernels* kernels[4];
};
AllCpuKernels all_cpu_kernels();

}  // namespace tessera::numerics
