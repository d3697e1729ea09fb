#include "tessera/numerics/detail/kernels.h"

#include "tessera/base/detail/parallel.h"
#include "tessera/base/error.h"
#include "tessera/numerics/detail/product_tile.h"
#include "tessera/numerics/detail/row_kernels.h"

#include <ATen/Dispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cstring>
#include <memory>

namespace tessera::numerics {
namespace {

// Terms that are added one after the other before the tree begins. Part of the definition of the sums.
constexpr int64_t kProductBlock = 64;  // shorter than a K block of BLAS libraries, so errors are not larger
constexpr int64_t kParallelWork = 1 << 15;

std::vector<int64_t> with_front(int64_t first, at::IntArrayRef rest) {
  std::vector<int64_t> sizes = {first};
  sizes.insert(sizes.end(), rest.begin(), rest.end());
  return sizes;
}

// ---- products ----

// A stack of matrices with any strides.
template <class T>
struct Matrices {
  const T* data;
  int64_t rows, columns, batch_stride, row_stride, column_stride;
};
template <class T>
Matrices<T> matrices(const at::Tensor& t) {
  return {t.const_data_ptr<T>(), t.size(1), t.size(2), t.stride(0), t.stride(1), t.stride(2)};
}

// Copies `width` rows of the matrix from `first` on to panel[column][width]; rows behind the last one are zero.
template <class T>
void pack_rows(const Matrices<T>& m, int64_t batch, int64_t first, int64_t width, T* panel) {
  const T* data = m.data + batch * m.batch_stride + first * m.row_stride;
  const int64_t rows = std::min(width, m.rows - first);
  if (m.row_stride == 1) {
    for (int64_t k = 0; k < m.columns; k++) {
      std::memcpy(panel + k * width, data + k * m.column_stride, static_cast<size_t>(rows) * sizeof(T));
      for (int64_t i = rows; i < width; i++) panel[k * width + i] = 0;
    }
    return;
  }
  constexpr int64_t kBlock = 16;  // columns: their part of the panel stays in the nearest cache
  for (int64_t begin = 0; begin < m.columns; begin += kBlock) {
    const int64_t end = std::min(m.columns, begin + kBlock);
    for (int64_t i = 0; i < rows; i++)
      for (int64_t k = begin; k < end; k++) panel[k * width + i] = data[i * m.row_stride + k * m.column_stride];
    for (int64_t i = rows; i < width; i++)
      for (int64_t k = begin; k < end; k++) panel[k * width + i] = 0;
  }
}

template <class T>
std::unique_ptr<T[]> pack(const Matrices<T>& m, int64_t batches, int64_t width) {
  const int64_t panels = (m.rows + width - 1) / width, size = m.columns * width;
  auto packed = std::make_unique_for_overwrite<T[]>(static_cast<size_t>(batches * panels * size));
  parallel_for(0, batches * panels, std::max<int64_t>(1, kParallelWork / std::max<int64_t>(1, size)),
               [&](int64_t begin, int64_t end) {
                 for (int64_t p = begin; p < end; p++)
                   pack_rows(m, p / panels, p % panels * width, width, packed.get() + p * size);
               });
  return packed;
}

template <class T>
void multiply(const at::Tensor& a, const at::Tensor& b, const std::vector<SumStep>& steps, size_t kernel_index,
              at::Tensor& out) {
  static const auto kernels = tile_kernels<T>();
  const auto& kernel = kernels.at(kernel_index);
  const int64_t subtrees = out.size(0), batches = out.size(1), rows = out.size(2), columns = out.size(3), k = a.size(2);
  const auto a_panels = pack(matrices<T>(a), batches, kernel.rows);
  const auto b_panels = pack(matrices<T>(b.transpose(1, 2)), batches, kernel.columns);
  const int64_t row_tiles = (rows + kernel.rows - 1) / kernel.rows;
  const int64_t column_tiles = (columns + kernel.columns - 1) / kernel.columns;
  const int64_t tile_size = kernel.rows * kernel.columns;
  T* result = out.data_ptr<T>();
  const int64_t grain = std::max<int64_t>(1, kParallelWork / std::max<int64_t>(1, tile_size * k));
  parallel_for(0, batches * column_tiles * row_tiles, grain, [&](int64_t begin, int64_t end) {
    std::vector<T> stack(static_cast<size_t>(stack_depth(steps) * tile_size));
    std::vector<T> tile(static_cast<size_t>(subtrees * tile_size));
    for (int64_t i = begin; i < end; i++) {
      const int64_t row_tile = i % row_tiles, column_panel = i / row_tiles;  // batch * column_tiles + column tile
      const int64_t batch = column_panel / column_tiles;
      const int64_t row = row_tile * kernel.rows, column = column_panel % column_tiles * kernel.columns;
      const int64_t height = std::min(kernel.rows, rows - row), width = std::min(kernel.columns, columns - column);
      const bool is_full = height == kernel.rows && width == kernel.columns;  // else it is computed beside the result
      kernel.run(a_panels.get() + (batch * row_tiles + row_tile) * k * kernel.rows,
                 b_panels.get() + column_panel * k * kernel.columns, steps.data(), static_cast<int64_t>(steps.size()),
                 stack.data(), is_full ? result + (batch * rows + row) * columns + column : tile.data(),
                 is_full ? batches * rows * columns : tile_size, is_full ? columns : kernel.columns);
      if (is_full) continue;
      for (int64_t s = 0; s < subtrees; s++)
        for (int64_t r = 0; r < height; r++)
          std::memcpy(result + ((s * batches + batch) * rows + row + r) * columns + column,
                      tile.data() + s * tile_size + r * kernel.columns, static_cast<size_t>(width) * sizeof(T));
    }
  });
}

// ---- sums ----

// Adds `count` vectors of `width` elements that are `stride` apart, in ascending order, to sums of +0.
template <class T>
void add_block(const T* x, int64_t count, int64_t stride, int64_t width, T* sums) {
  std::fill(sums, sums + width, T(0));
  for (int64_t i = 0; i < count; i++, x += stride)
    for (int64_t j = 0; j < width; j++) sums[j] += x[j];
}

constexpr int64_t kSumWidth = 64;  // neighbours that are summed together

// Sums of `width` <= kSumWidth neighbours over the terms, which are `stride` apart. Subtree s goes to
// out + s * subtree_stride.
template <class T>
void sum_neighbours(const T* x, int64_t stride, int64_t width, const std::vector<SumStep>& steps, T* stack, T* out,
                    int64_t subtree_stride) {
  T* top = stack;
  T sums[kSumWidth];
  for (const auto& step : steps) {
    add_block(x + step.begin * stride, step.end - step.begin, stride, width, sums);
    for (int merge = 0; merge < step.merges; merge++) {
      top -= width;
      for (int64_t j = 0; j < width; j++) sums[j] = top[j] + sums[j];
    }
    T* to = step.subtree < 0 ? top : out + step.subtree * subtree_stride;
    std::copy(sums, sums + width, to);
    if (step.subtree < 0) top += width;
  }
}

template <class T>
void sum_over_dim(const T* x, int64_t outer, int64_t terms, int64_t inner, const std::vector<SumStep>& steps, T* out) {
  const int64_t chunks = (inner + kSumWidth - 1) / kSumWidth;
  const int64_t grain = std::max<int64_t>(1, kParallelWork / std::max<int64_t>(1, terms * std::min(inner, kSumWidth)));
  parallel_for(0, outer * chunks, grain, [&](int64_t begin, int64_t end) {
    std::vector<T> stack(static_cast<size_t>(stack_depth(steps) * kSumWidth));
    for (int64_t i = begin; i < end; i++) {
      const int64_t o = i / chunks, column = i % chunks * kSumWidth;
      sum_neighbours(x + o * terms * inner + column, inner, std::min(kSumWidth, inner - column), steps, stack.data(),
                     out + o * inner + column, outer * inner);
    }
  });
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

at::Tensor product_subtrees(const at::Tensor& a, const at::Tensor& b, const Terms& k, size_t kernel) {
  check_dtype(a, "a product");
  const auto steps = steps_of(k, kProductBlock);
  const auto subtrees = static_cast<int64_t>(subtrees_of(k).size());
  auto out = at::empty({subtrees, a.size(0), a.size(1), b.size(2)}, a.options());
  if (out.numel() > 0)
    AT_DISPATCH_FLOATING_TYPES(a.scalar_type(), "product_subtrees",
                               [&] { multiply<scalar_t>(a, b, steps, kernel, out); });
  return out;
}

at::Tensor sum_subtrees(const at::Tensor& x, int64_t dim, const Terms& terms) {
  check_dtype(x, "a sum");
  const auto contiguous = x.contiguous();
  const auto sizes = contiguous.sizes();
  int64_t outer = 1, inner = 1;
  for (int64_t d = 0; d < dim; d++) outer *= sizes[d];
  for (int64_t d = dim + 1; d < x.dim(); d++) inner *= sizes[d];
  std::vector<int64_t> kept = sizes.vec();
  kept.erase(kept.begin() + dim);
  const auto steps = steps_of(terms, kSumBlock);
  const auto subtrees = static_cast<int64_t>(subtrees_of(terms).size());
  auto out = at::empty(with_front(subtrees, kept), x.options());
  if (out.numel() > 0)
    AT_DISPATCH_FLOATING_TYPES(x.scalar_type(), "sum_subtrees", [&] {
      if (inner == 1 && outer >= 4) {  // neighbours are terms: rows are computed together instead
        const int depth = stack_depth(steps);
        return sum_rows<scalar_t>(contiguous.const_data_ptr<scalar_t>(), outer, {sizes[dim], steps, depth},
                                  out.data_ptr<scalar_t>(), outer);
      }
      sum_over_dim(contiguous.const_data_ptr<scalar_t>(), outer, sizes[dim], inner, steps, out.data_ptr<scalar_t>());
    });
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

at::Tensor add_subtrees(const at::Tensor& subtrees, int64_t terms, const std::vector<IndexRange>& ranges) {
  if (ranges.empty()) return at::zeros(subtrees.sizes().slice(1), subtrees.options());
  if (ranges.size() == 1) return subtrees.select(0, 0);
  std::vector<at::Tensor> slots;
  for (int64_t s = 0; s < subtrees.size(0); s++) slots.push_back(subtrees.select(0, s));
  for (const auto& step : add_steps(terms, ranges))  // exact elementwise additions: any kernel gives the same bits
    slots.push_back(slots[static_cast<size_t>(step.left)] + slots[static_cast<size_t>(step.right)]);
  return slots.back();
}

}  // namespace tessera::numerics
