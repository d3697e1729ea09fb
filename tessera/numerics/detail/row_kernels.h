#pragma once
#include "tessera/numerics/detail/sum_tree.h"

#include <cstdint>
#include <vector>

// Loops over the rows of matrices (rows, n) under Numerics::Invariant: sums over a row and Adam, and in float64 norms
// and the parts of attention between its products. Those in float32 are in vector/cpu_kernels.h.
//
// They use + - * / and sqrt alone, which IEEE 754 rounds correctly, and the order of sum_tree.h. 16 rows are computed
// together, and a lane of a vector is one row. So the bits of a row depend on that row alone, and not on the number of
// rows, their position, the vector width or the number of threads. Row pointers are contiguous matrices.
namespace tessera::numerics {

// Steps over one row of n terms, in the order of a sum.
struct RowSteps {
  int64_t n;                   // terms that this rank has
  std::vector<SumStep> steps;  // over them
  int depth = 0;               // stack_depth(steps)
};
RowSteps row_steps(int64_t n);  // all terms of a row, in blocks of kSumBlock

// Terms that are added one after the other before the tree begins. Part of the definition of the sums.
inline constexpr int64_t kSumBlock = 16;  // as ATen's cascade sum

// The complete subtrees of each row: out[subtree * subtree_stride + row].
template <class T>
void sum_rows(const T* x, int64_t rows, const RowSteps& steps, T* out, int64_t subtree_stride);

// y = (x - mean) * rstd * weight + bias,  rstd = 1 / sqrt(mean of squares + eps). weight and bias can be null.
// An rms norm has no mean: pass null.
void norm_rows(const double* x, int64_t rows, const RowSteps& steps, const double* weight, const double* bias,
               double eps, double* y, double* mean, double* rstd);

// Backward of norm_rows:  dx = rstd * (g - mean(g) - xhat * mean(g * xhat)),  g = dy * weight,  xhat = (x - mean) *
// rstd For an rms norm (mean null) without the term mean(g). Writes dy * xhat to `products`, whose sum over rows is the
// gradient of the weight. dx or products can be null.
void norm_backward_rows(const double* dy, const double* x, int64_t rows, const RowSteps& steps, const double* weight,
                        const double* mean, const double* rstd, double* dx, double* products);

// Scores of attention, in place: x * scale - c. Row r has the query r % queries; with `causal`, keys behind the query
// get -infinity. c is the maximum of the row, which is written to `largest`, or given[row] if `given` is not null.
void shift_scores(double* x, int64_t rows, int64_t n, int64_t queries, double scale, bool causal, double* largest,
                  const double* given);

// Divides each row by its sum, in place. Writes the sums.
void divide_by_sums(double* x, int64_t rows, const RowSteps& steps, double* sums);

// ds = p * (dp - delta) * scale, in place of dp.
void score_gradients(const double* p, double* dp, int64_t rows, int64_t n, const double* delta, double scale);

// One step of Adam or AdamW with numbers that depend on the step alone.
struct AdamStep {
  double weight_factor;  // AdamW: 1 - lr * weight_decay, of the parameter
  double l2;             // Adam: weight_decay, times the parameter is added to the gradient
  double beta1, beta2, eps;
  double step_size;            // lr / (1 - beta1^t)
  double root_of_correction2;  // sqrt(1 - beta2^t)
  bool maximize;
};
// Updates n elements. `largest_sq` (amsgrad) can be null.
template <class T>
void adam_elements(const AdamStep& step, int64_t n, T* parameter, const T* gradient, T* exp_avg, T* exp_avg_sq,
                   T* largest_sq);

}  // namespace tessera::numerics
