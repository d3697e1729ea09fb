#include "tessera/numerics/detail/vector/tiled_product.h"

#include "tessera/base/detail/parallel.h"
#include "tessera/base/error.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <memory>
#include <type_traits>

namespace tessera::numerics {
namespace {

StridedMatrix<float> matrix_of(const at::Tensor& t, const char* name) {
  TESSERA_CHECK(
      t.defined() && t.dim() == 2 && t.scalar_type() == at::kFloat && t.is_cpu() && !t.is_neg(), UsageError,
      "tiled_product: ", name, " is ",
      t.defined() ? c10::str("a ", t.scalar_type(), " tensor of shape ", t.sizes(), " on ", t.device()) : "undefined",
      "; it must be a float32 matrix on the CPU");
  const auto rows = t.size(0), columns = t.size(1);
  const bool by_rows = (t.stride(1) == 1 || columns <= 1) && (t.stride(0) >= columns || rows <= 1);
  const bool by_columns = (t.stride(0) == 1 || rows <= 1) && (t.stride(1) >= rows || columns <= 1);
  TESSERA_CHECK(by_rows || by_columns, UsageError, "tiled_product: ", name, " of shape ", t.sizes(), " has strides ",
                t.strides(), "; one of them must be 1. Call contiguous() first");
  auto* data = const_cast<float*>(t.const_data_ptr<float>());
  return by_rows ? StridedMatrix<float>{data, std::max(t.stride(0), columns), 1}
                 : StridedMatrix<float>{data, 1, std::max(t.stride(1), rows)};
}
StridedMatrix<const float> only_read(const StridedMatrix<float>& matrix) {
  return {matrix.data, matrix.row, matrix.column};
}

// As many elements as `out`, without gaps; the shape may be another.
StridedMatrix<float> like_out(const at::Tensor& t, const at::Tensor& out, const char* name) {
  TESSERA_CHECK(t.defined() && t.is_contiguous() && t.numel() == out.numel() && t.scalar_type() == at::kFloat &&
                    t.is_cpu() && !t.is_neg(),
                UsageError, "tiled_product: ", name, " must be a contiguous float32 tensor of ", out.numel(),
                " elements on the CPU");
  return {const_cast<float*>(t.const_data_ptr<float>()), out.size(1), 1};
}

bool reads_operand(ProductEpilogue epilogue) {
  return epilogue == ProductEpilogue::GeluBackward || epilogue == ProductEpilogue::GeluTanhBackward;
}
bool writes_result(ProductEpilogue epilogue) {
  return epilogue == ProductEpilogue::Gelu || epilogue == ProductEpilogue::GeluTanh;
}

}  // namespace

// By columns if there are enough of them, because then no two threads copy the same panel.
template <class T>
void multiply_in_parallel(const std::vector<ProductOperands<T>>& products, const CpuKernels& kernels) {
  if (products.empty()) return;
  const int64_t m = products[0].m, n = products[0].n, count = static_cast<int64_t>(products.size());
  const auto run = [&](ProductOperands<T> product, int64_t row, int64_t row_end, int64_t column, int64_t column_end) {
    const auto with_scratch = [&](auto multiply, auto size_of_scratch) {
      const auto size = size_of_scratch(product, row_end - row, column_end - column);
      const auto scratch = std::make_unique_for_overwrite<T[]>(static_cast<size_t>(size));
      product.scratch = scratch.get();
      multiply(product, row, row_end, column, column_end);
    };
    if constexpr (std::is_same_v<T, float>)
      with_scratch(kernels.multiply, kernels.product_scratch);
    else
      with_scratch(kernels.multiply_doubles, kernels.product_scratch_doubles);
  };
  const int64_t panel = kernels.product_columns * int64_t{sizeof(float)} / int64_t{sizeof(T)};
  const int64_t panels = (n + panel - 1) / panel, threads = at::get_num_threads();
  constexpr double kSmallestShared = 1 << 18;  // multiplications
  const bool is_small = static_cast<double>(count * m * n) * static_cast<double>(products[0].k) < kSmallestShared;
  if (threads == 1 || count >= 2 * threads || is_small)
    return parallel_for(0, count, is_small ? count : 1, [&](int64_t begin, int64_t end) {
      for (auto i = begin; i < end; i++) run(products[static_cast<size_t>(i)], 0, m, 0, n);
    });
  for (const auto& product : products) {
    if (panels >= 2 * threads) {
      parallel_for(0, panels, 1,
                   [&](int64_t begin, int64_t end) { run(product, 0, m, begin * panel, std::min(end * panel, n)); });
      continue;
    }
    constexpr int64_t kRowsPerTask = 24;  // a multiple of the rows of all tiles
    parallel_for(0, (m + kRowsPerTask - 1) / kRowsPerTask, 1, [&](int64_t begin, int64_t end) {
      run(product, begin * kRowsPerTask, std::min(end * kRowsPerTask, m), 0, n);
    });
  }
}
template void multiply_in_parallel(const std::vector<ProductOperands<float>>&, const CpuKernels&);
template void multiply_in_parallel(const std::vector<ProductOperands<double>>&, const CpuKernels&);

void tiled_product(const at::Tensor& out, const at::Tensor& a, const at::Tensor& b,
                   const TiledProductOptions& options) {
  const auto left = matrix_of(a, "a"), right = matrix_of(b, "b"), into = matrix_of(out, "out");
  TESSERA_CHECK(a.size(1) == b.size(0) && out.size(0) == a.size(0) && out.size(1) == b.size(1) && into.column == 1,
                UsageError, "tiled_product: a is ", a.sizes(), ", b is ", b.sizes(), ", out is ", out.sizes(),
                " with strides ", out.strides(), "; write a (m, k), b (k, n), out (m, n) by rows");
  const auto& bias = options.bias;
  const auto has_bias = bias && bias->defined();
  TESSERA_CHECK(!has_bias || (bias->dim() == 1 && bias->size(0) == b.size(1) && bias->is_contiguous() &&
                              bias->scalar_type() == at::kFloat && bias->is_cpu()),
                UsageError, "tiled_product: the bias must be a contiguous float32 vector of ", b.size(1),
                " elements on the CPU");
  ProductOperands<float> product{out.size(0), out.size(1), a.size(1), only_read(left), only_read(right), into};
  product.bias = has_bias ? bias->const_data_ptr<float>() : nullptr;
  product.epilogue = options.epilogue;
  if (reads_operand(options.epilogue)) product.operand = only_read(like_out(options.operand, out, "the operand"));
  if (writes_result(options.epilogue)) product.result = like_out(options.result, out, "the result");
  if (out.numel() > 0) multiply_in_parallel<float>({product});
}

}  // namespace tessera::numerics
