#pragma once
#include "tessera/numerics/detail/sum_tree.h"
#include "tessera/numerics/detail/vector/cpu_kernels.h"

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

// The order of the sums of products over K.
std::vector<SumStep> product_steps(const Terms& k);

// The complete subtrees of the product of a (B, M, K) and b (B, K, N), any strides: a tensor (subtrees, B, M, N). B can
// be missing. Requires: K == size of k.owned. `kernels`: for tests.
at::Tensor product_subtrees(const at::Tensor& a, const at::Tensor& b, const Terms& k,
                            const CpuKernels& kernels = cpu_kernels());
std::vector<int64_t> product_sizes(const at::Tensor& a, const at::Tensor& b, const Terms& k);  // of the result
void product_subtrees_into(const at::Tensor& out, const at::Tensor& a, const at::Tensor& b, const Terms& k,
                           const CpuKernels& kernels = cpu_kernels());

// The complete subtrees of the sum of x over one dim: a tensor (subtrees, sizes without dim). Requires:
// x.size(dim) == size of terms.owned.
at::Tensor sum_subtrees(const at::Tensor& x, int64_t dim, const Terms& terms);
std::vector<int64_t> sum_sizes(const at::Tensor& x, int64_t dim, const Terms& terms);  // of the result
void sum_subtrees_into(const at::Tensor& out, const at::Tensor& x, int64_t dim, const Terms& terms);

// The complete subtrees of the gradient of an embedding table: a tensor (subtrees, rows, D). Row indices[t] gets the
// sum of grad[t] over the tokens t of that row. grad (T, D), indices (T). Rows below 0 or from `rows` on get nothing,
// nor does row padding_index.
at::Tensor embedding_gradient_subtrees(const at::Tensor& grad, const at::Tensor& indices, int64_t rows,
                                       int64_t padding_index, const Terms& tokens);

// The sum, from the complete subtrees of all ranks in ascending order: (subtrees, ...) -> (...). `shortest` as in
// leaf_bounds().
at::Tensor add_subtrees(const at::Tensor& subtrees, int64_t terms, const std::vector<IndexRange>& ranges,
                        int64_t shortest = kShortestShard);

}  // namespace tessera::numerics
