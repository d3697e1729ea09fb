#pragma once
#include "tessera/numerics/detail/sum_tree.h"

#include <ATen/core/Tensor.h>

// Kernels whose sums have the order of sum_tree.h. Plain float32 and float64 tensors on the CPU.
namespace tessera::numerics {

// The range of the summed dim that this rank has: `owned` of `terms`.
struct Terms {
  int64_t terms;
  IndexRange owned;
  // Not empty: the dim is these virtual shards of `shard_count`, one after the other, and all terms are owned. The sum
  // is their node of the tree over virtual shards (shard_batch.h).
  IndexRange shards = {0, 0};
  int64_t shard_count = 0;
  bool operator==(const Terms&) const = default;
};
inline Terms all_terms(int64_t n) { return {n, {0, n}}; }
// The complete subtrees of the terms, and the steps that compute them.
std::vector<IndexRange> subtrees_of(const Terms& terms);
std::vector<SumStep> steps_of(const Terms& terms, int64_t block);

// Throws UsageError for a tensor that is not float32 or float64 on the CPU. `what`: "a product".
void check_dtype(const at::Tensor& x, const char* what);

// The complete subtrees of the product of a (B, M, K) and b (B, K, N), any strides: a tensor (subtrees, B, M, N).
// Requires: K == size of k.owned.
// `kernel`: which of tile_kernels() computes it, for tests.
at::Tensor product_subtrees(const at::Tensor& a, const at::Tensor& b, const Terms& k, size_t kernel = 0);

// The complete subtrees of the sum of x over one dim: a tensor (subtrees, sizes without dim). Requires:
// x.size(dim) == size of terms.owned.
at::Tensor sum_subtrees(const at::Tensor& x, int64_t dim, const Terms& terms);

// The complete subtrees of the gradient of an embedding table: a tensor (subtrees, rows, D). Row indices[t] gets the
// sum of grad[t] over the tokens t of that row. grad (T, D), indices (T). Rows below 0 or from `rows` on get nothing,
// nor does row padding_index.
at::Tensor embedding_gradient_subtrees(const at::Tensor& grad, const at::Tensor& indices, int64_t rows,
                                       int64_t padding_index, const Terms& tokens);

// The sum, from the complete subtrees of all ranks in ascending order: (subtrees, ...) -> (...).
at::Tensor add_subtrees(const at::Tensor& subtrees, int64_t terms, const std::vector<IndexRange>& ranges);

}  // namespace tessera::numerics
