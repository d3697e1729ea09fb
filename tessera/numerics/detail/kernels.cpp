#include "tessera/numerics/detail/kernels.h"

#include "tessera/base/detail/parallel.h"
#include "tessera/base/error.h"
#include "tessera/numerics/detail/row_kernels.h"
#include "tessera/numerics/detail/vector/tiled_product.h"
#include "tessera/numerics/detail/vector/vector_ops.h"

#include <ATen/Dispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cstring>

namespace tessera::numerics {
namespace {

// Terms that are added one after the other before the tree begins. Part of the definition of the sums.
constexpr int64_t kTermsPerLeaf = 128;  // shorter than a K block of BLAS libraries, so errors are not larger

std::vector<int64_t> with_front(int64_t first, at::IntArrayRef rest) {
  std::vector<int64_t> sizes = {first};
  sizes.insert(sizes.end(), rest.begin(), rest.end());
  return sizes;
}

// ---- products ----

// (batch, rows, columns), with unit stride in one of the last two dims.
at::Tensor with_unit_stride(const at::Tensor& t) {
  for (const int64_t dim : {1, 2})
    if (t.stride(dim) == 1 || t.size(dim) == 1) return t;
  return t.contiguous();
}
template <class T>
StridedMatrix<const T> matrix_of(const at::Tensor& t, int64_t batch) {
  const auto* data = t.const_data_ptr<T>() + batch * t.stride(0);
  const bool by_rows = t.stride(2) == 1 || t.size(2) == 1;
  return by_rows ? StridedMatrix<const T>{data, t.stride(1), 1} : StridedMatrix<const T>{data, 1, t.stride(2)};
}

template <class T>
void multiply(const at::Tensor& a_, const at::Tensor& b_, const std::vector<SumStep>& steps, const CpuKernels& kernels,
              const at::Tensor& out) {  // (subtrees, batch, rows, columns), contiguous
  const auto a = with_unit_stride(a_), b = with_unit_stride(b_);
  const int64_t batches = a.size(0), rows = a.size(1), columns = b.size(2);
  std::vector<ProductOperands<T>> products;
  for (int64_t i = 0; i < batches; i++) {
    auto& product = products.emplace_back(ProductOperands<T>{rows,
                                                             columns,
                                                             a.size(2),
                                                             matrix_of<T>(a, i),
                                                             matrix_of<T>(b, i),
                                                             {out.data_ptr<T>() + i * rows * columns, columns, 1}});
    product.steps = steps.data();
    product.step_count = static_cast<int64_t>(steps.size());
    product.stack = stack_depth(steps);
    product.subtree_stride = batches * rows * columns;
  }
  multiply_in_parallel(products, kernels);
}

}  // namespace

std::vector<IndexRange> subtrees_of(const Terms& terms) {
  if (terms.shard_count > 0) return {{0, terms.terms}};
  return complete_subtrees(terms.terms, terms.owned);
}

std::vector<SumStep> steps_of(const Terms& terms, int64_t block) {
  if (terms.shard_count == 0) return sum_steps(terms.terms, terms.owned, block);
  const int64_t shards = terms.shards.end - terms.shards.begin;
  return nested_steps(terms.shard_count, terms.shards, terms.terms / shards, block);
}

void check_dtype(const at::Tensor& x, const char* what) {
  TESSERA_CHECK(x.device().is_cpu() && (x.scalar_type() == at::kFloat || x.scalar_type() == at::kDouble), UsageError,
                "Numerics::Invariant: ", what, " of ", x.scalar_type(), " on ", x.device(),
                "; there are kernels for float32 and float64 on the CPU");
}

std::vector<SumStep> product_steps(const Terms& k) { return steps_of(k, kTermsPerLeaf); }

std::vector<int64_t> product_sizes(const at::Tensor& a, const at::Tensor& b, const Terms& k) {
  auto sizes = with_front(static_cast<int64_t>(subtrees_of(k).size()), a.sizes());
  sizes.back() = b.size(-1);
  return sizes;
}

void product_subtrees_into(const at::Tensor& out, const at::Tensor& a, const at::Tensor& b, const Terms& k,
                           const CpuKernels& kernels) {
  check_dtype(a, "a product");
  const auto steps = product_steps(k);
  const bool batched = a.dim() == 3;
  TESSERA_CHECK(a.dim() == b.dim() && (batched ? a.size(0) == b.size(0) : a.dim() == 2) && a.size(-1) == b.size(-2) &&
                    out.sizes() == product_sizes(a, b, k) && out.is_contiguous() &&
                    a.size(-1) == (k.shard_count > 0 ? k.terms : k.owned.end - k.owned.begin),
                UsageError, "tree_product: a is ", a.sizes(), ", b is ", b.sizes(), ", out is ", out.sizes());
  if (out.numel() == 0) return;
  AT_DISPATCH_FLOATING_TYPES(a.scalar_type(), "product_subtrees", [&] {
    multiply<scalar_t>(batched ? a : a.unsqueeze(0), batched ? b : b.unsqueeze(0), steps, kernels, out);
  });
}

at::Tensor product_subtrees(const at::Tensor& a, const at::Tensor& b, const Terms& k, const CpuKernels& kernels) {
  auto out = at::empty(product_sizes(a, b, k), a.options());
  product_subtrees_into(out, a, b, k, kernels);
  return out;
}

std::vector<int64_t> sum_sizes(const at::Tensor& x, int64_t dim, const Terms& terms) {
  auto sizes = with_front(static_cast<int64_t>(subtrees_of(terms).size()), x.sizes());
  sizes.erase(sizes.begin() + 1 + dim);
  return sizes;
}

void sum_subtrees_into(const at::Tensor& out, const at::Tensor& x, int64_t dim, const Terms& terms) {
  check_dtype(x, "a sum");
  const auto contiguous = x.contiguous();
  const auto sizes = contiguous.sizes();
  TESSERA_CHECK(dim >= 0 && dim < x.dim() && out.sizes() == sum_sizes(x, dim, terms) && out.is_contiguous() &&
                    out.scalar_type() == x.scalar_type() &&
                    sizes[dim] == (terms.shard_count > 0 ? terms.terms : terms.owned.end - terms.owned.begin),
                UsageError, "tree_sum: dim ", dim, " of x ", x.sizes(), ", out is ", out.sizes());
  int64_t outer = 1, inner = 1;
  for (int64_t d = 0; d < dim; d++) outer *= sizes[d];
  for (int64_t d = dim + 1; d < x.dim(); d++) inner *= sizes[d];
  const auto steps = steps_of(terms, kSumBlock);
  if (out.numel() == 0) return;
  AT_DISPATCH_FLOATING_TYPES(x.scalar_type(), "sum_subtrees", [&] {
    if (inner == 1 && outer >= 4) {  // neighbours are terms: rows are computed together instead
      const int depth = stack_depth(steps);
      return sum_rows<scalar_t>(contiguous.const_data_ptr<scalar_t>(), outer, {sizes[dim], steps, depth},
                                out.data_ptr<scalar_t>(), outer);
    }
    const auto* data = contiguous.const_data_ptr<scalar_t>();
    sum_in_parallel<scalar_t>({data, inner, inner, out.data_ptr<scalar_t>(), outer * inner, nullptr}, steps,
                              {outer, sizes[dim] * inner, inner});
  });
}

at::Tensor sum_subtrees(const at::Tensor& x, int64_t dim, const Terms& terms) {
  auto out = at::empty(sum_sizes(x, dim, terms), x.options());
  sum_subtrees_into(out, x, dim, terms);
  return out;
}

at::Tensor embedding_gradient_subtrees(const at::Tensor& grad, const at::Tensor& indices, int64_t rows,
                                       int64_t padding_index, const Terms& tokens) {
  check_dtype(grad, "an embedding gradient");
  const auto values = grad.contiguous();
  const auto index = indices.contiguous().to(at::kLong);
  const int64_t width = values.size(1), count = values.size(0);
  const auto* rows_of = index.const_data_ptr<int64_t>();
  std::vector<int64_t> order;
  for (int64_t t = 0; t < count; t++)
    if (rows_of[t] >= 0 && rows_of[t] < rows && rows_of[t] != padding_index) order.push_back(t);
  std::stable_sort(order.begin(), order.end(), [&](int64_t l, int64_t r) { return rows_of[l] < rows_of[r]; });
  const auto steps = steps_of(tokens, kSumBlock);
  const auto subtrees = static_cast<int64_t>(subtrees_of(tokens).size());
  auto out = at::zeros({subtrees, rows, width}, grad.options());
  AT_DISPATCH_FLOATING_TYPES(grad.scalar_type(), "embedding_gradient_subtrees", [&] {
    const auto* x = values.const_data_ptr<scalar_t>();
    auto* result = out.data_ptr<scalar_t>();
    std::vector<scalar_t> stack(static_cast<size_t>((stack_depth(steps) + 1) * width));
    std::vector<bool> filled(static_cast<size_t>(stack_depth(steps) + 1));
    std::vector<scalar_t> sums(static_cast<size_t>(width));
    for (size_t first = 0; first < order.size();) {
      const int64_t row = rows_of[order[first]];
      size_t next = first;  // the token that is added next
      size_t top = 0;
      for (const auto& step : steps) {
        // A block without tokens of this row is +0, and no sum here is -0: skipping it gives the same bits.
        bool has_terms = false;
        std::fill(sums.begin(), sums.end(), scalar_t(0));
        for (; next < order.size() && rows_of[order[next]] == row && order[next] < step.end; next++, has_terms = true)
          for (int64_t j = 0; j < width; j++) sums[static_cast<size_t>(j)] += x[order[next] * width + j];
        for (int merge = 0; merge < step.merges; merge++) {
          top--;
          if (!filled[top]) continue;
          const auto* left = stack.data() + static_cast<int64_t>(top) * width;
          if (has_terms)
            for (int64_t j = 0; j < width; j++) sums[static_cast<size_t>(j)] = left[j] + sums[static_cast<size_t>(j)];
          else
            std::copy(left, left + width, sums.begin());
          has_terms = true;
        }
        if (step.subtree >= 0) {
          if (has_terms) std::copy(sums.begin(), sums.end(), result + (step.subtree * rows + row) * width);
        } else {
          if (has_terms) std::copy(sums.begin(), sums.end(), stack.data() + static_cast<int64_t>(top) * width);
          filled[top++] = has_terms;
        }
      }
      first = next;
    }
  });
  return out;
}

at::Tensor add_subtrees(const at::Tensor& subtrees, int64_t terms, const std::vector<IndexRange>& ranges,
                        int64_t shortest) {
  if (ranges.empty()) return at::zeros(subtrees.sizes().slice(1), subtrees.options());
  if (ranges.size() == 1) return subtrees.select(0, 0);
  std::vector<at::Tensor> slots;
  for (int64_t s = 0; s < subtrees.size(0); s++) slots.push_back(subtrees.select(0, s));
  for (const auto& step :
       add_steps(terms, ranges, shortest))  // exact elementwise additions: any kernel gives the same bits
    slots.push_back(slots[static_cast<size_t>(step.left)] + slots[static_cast<size_t>(step.right)]);
  return slots.back();
}

}  // namespace tessera::numerics
