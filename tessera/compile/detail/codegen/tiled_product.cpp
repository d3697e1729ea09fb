#include "tessera/compile/detail/codegen/tiled_product.h"

#include "tessera/base/error.h"

#include <ATen/Parallel.h>
#include <ATen/native/CPUBlas.h>
#include <c10/core/CPUAllocator.h>
#include <torch/library.h>

#include <algorithm>

namespace tessera::compiler::codegen {
namespace {

// A tile of b has 512 KB and stays in the second-level cache while a tile of a is multiplied with it.
constexpr int64_t kRowsPerTile = 128, kColumnsPerTile = 256, kDepthOfTile = 512;

// A matrix in memory. If it is transposed, element (i, j) is at j * stride + i, otherwise at i * stride + j.
struct Matrix {
  const float* data;
  int64_t rows, columns, stride;
  bool transposed;
};

Matrix matrix_of(const at::Tensor& t, const char* name) {
  TESSERA_CHECK(t.dim() == 2 && t.scalar_type() == at::kFloat && t.is_cpu(), UsageError, "tiled_product: ", name,
                " is a ", t.scalar_type(), " tensor of shape ", t.sizes(), " on ", t.device(),
                "; it must be a float32 matrix on the CPU");
  const auto rows = t.size(0), columns = t.size(1);
  const bool by_rows = (t.stride(1) == 1 || columns <= 1) && (t.stride(0) >= columns || rows <= 1);
  const bool by_columns = (t.stride(0) == 1 || rows <= 1) && (t.stride(1) >= rows || columns <= 1);
  TESSERA_CHECK(by_rows || by_columns, UsageError, "tiled_product: ", name, " of shape ", t.sizes(), " has strides ",
                t.strides(), "; one of them must be 1. Call contiguous() first");
  const auto* data = t.const_data_ptr<float>();
  return by_rows ? Matrix{data, rows, columns, std::max(t.stride(0), columns), false}
                 : Matrix{data, rows, columns, std::max(t.stride(1), rows), true};
}

using Float4 = float __attribute__((vector_size(16), aligned(4)));

void transpose_4x4(const float* in, int64_t in_stride, float* out, int64_t out_stride) {
  Float4 row[4];
  for (int64_t i = 0; i < 4; i++) row[i] = *reinterpret_cast<const Float4*>(in + i * in_stride);
  const auto a = __builtin_shufflevector(row[0], row[1], 0, 4, 1, 5),
             b = __builtin_shufflevector(row[2], row[3], 0, 4, 1, 5),
             c = __builtin_shufflevector(row[0], row[1], 2, 6, 3, 7),
             d = __builtin_shufflevector(row[2], row[3], 2, 6, 3, 7);
  const Float4 columns[4] = {__builtin_shufflevector(a, b, 0, 1, 4, 5), __builtin_shufflevector(a, b, 2, 3, 6, 7),
                             __builtin_shufflevector(c, d, 0, 1, 4, 5), __builtin_shufflevector(c, d, 2, 3, 6, 7)};
  for (int64_t i = 0; i < 4; i++) *reinterpret_cast<Float4*>(out + i * out_stride) = columns[i];
}

// out (columns, rows) = transpose of in (rows, columns). Reads four rows from begin to end. The written cache lines
// stay in the first-level cache until they are full, unless out_stride is a multiple of 4 KB: see padded().
void transpose(const float* in, int64_t in_stride, int64_t rows, int64_t columns, float* out, int64_t out_stride) {
  int64_t r = 0;
  for (; r + 4 <= rows; r += 4) {
    int64_t c = 0;
    for (; c + 4 <= columns; c += 4)
      transpose_4x4(in + r * in_stride + c, in_stride, out + c * out_stride + r, out_stride);
    for (; c < columns; c++)
      for (int64_t i = r; i < r + 4; i++) out[c * out_stride + i] = in[i * in_stride + c];
  }
  for (; r < rows; r++)
    for (int64_t c = 0; c < columns; c++) out[c * out_stride + r] = in[r * in_stride + c];
}

// The stride of a copy with rows of this length. Without the padding, rows of a power of two map to few cache sets.
int64_t padded(int64_t columns) { return columns + 16; }

at::DataPtr allocate_floats(int64_t count) {
  return c10::GetCPUAllocator()->allocate(static_cast<size_t>(count) * sizeof(float));
}
float* floats(const at::DataPtr& memory) { return static_cast<float*>(memory.get()); }

// The matrix in row-major order; `memory` owns it if it had to be copied.
Matrix by_rows(const Matrix& b, at::DataPtr& memory) {
  if (!b.transposed) return b;
  const auto stride = padded(b.columns);
  memory = allocate_floats(b.rows * stride);
  constexpr int64_t kColumnsPerTask = 64;
  at::parallel_for(0, (b.columns + kColumnsPerTask - 1) / kColumnsPerTask, 1, [&](int64_t begin, int64_t end) {
    const auto first = begin * kColumnsPerTask, last = std::min(end * kColumnsPerTask, b.columns);
    transpose(b.data + first * b.stride, b.stride, last - first, b.rows, floats(memory) + first, stride);
  });
  return {floats(memory), b.rows, b.columns, stride, false};
}

void multiply_tiles(float* out, int64_t out_stride, const Matrix& a, const Matrix& b, const float* bias) {
  const auto n = b.columns, k = b.rows, tiles = (a.rows + kRowsPerTile - 1) / kRowsPerTile;
  at::parallel_for(0, tiles, 1, [&](int64_t begin, int64_t end) {
    at::DataPtr rows_of_tile;
    if (a.transposed) rows_of_tile = allocate_floats(kRowsPerTile * padded(k));
    for (auto tile = begin; tile < end; tile++) {
      const auto first = tile * kRowsPerTile, rows = std::min(kRowsPerTile, a.rows - first);
      auto* into = out + first * out_stride;
      const auto* from = a.data + first * a.stride;
      auto stride = a.stride;
      if (a.transposed) {
        transpose(a.data + first, a.stride, k, rows, floats(rows_of_tile), padded(k));
        from = floats(rows_of_tile), stride = padded(k);
      }
      for (int64_t i = 0; bias && i < rows; i++) std::copy(bias, bias + n, into + i * out_stride);
      for (int64_t j = 0; j < n; j += kColumnsPerTile)
        for (int64_t l = 0; l < k; l += kDepthOfTile)
          at::native::cpublas::brgemm(rows, std::min(kColumnsPerTile, n - j), std::min(kDepthOfTile, k - l), stride,
                                      b.stride, out_stride, bias || l > 0, from + l, b.data + l * b.stride + j,
                                      into + j, false);
    }
  });
}

TORCH_LIBRARY_FRAGMENT(tessera, m) { m.def("tiled_product(Tensor(a!) out, Tensor a, Tensor b, Tensor? bias) -> ()"); }
TORCH_LIBRARY_IMPL(tessera, CPU, m) { m.impl("tiled_product", &tiled_product); }

}  // namespace

bool has_tiled_product() {
  static const bool found = [] {
    const float a[16] = {2}, b[16] = {3};
    float c[16] = {};
    try {
      at::native::cpublas::brgemm(1, 16, 1, 1, 16, 16, false, a, b, c, false);
    } catch (const c10::Error&) {
      return false;  // LibTorch was built without it, or the processor has no AVX-512
    }
    return c[0] == 6;
  }();
  return found;
}

void tiled_product(const at::Tensor& out, const at::Tensor& a, const at::Tensor& b,
                   const std::optional<at::Tensor>& bias) {
  const auto left = matrix_of(a, "a"), right = matrix_of(b, "b"), into = matrix_of(out, "out");
  TESSERA_CHECK(
      left.columns == right.rows && into.rows == left.rows && into.columns == right.columns && !into.transposed,
      UsageError, "tiled_product: a is ", a.sizes(), ", b is ", b.sizes(), ", out is ", out.sizes(), " with strides ",
      out.strides(), "; write a (m, k), b (k, n), out (m, n) by rows");
  const auto has_bias = bias && bias->defined();
  TESSERA_CHECK(!has_bias || (bias->dim() == 1 && bias->size(0) == right.columns && bias->is_contiguous() &&
                              bias->scalar_type() == at::kFloat && bias->is_cpu()),
                UsageError, "tiled_product: the bias must be a contiguous float32 vector of ", right.columns,
                " elements on the CPU");
  if (out.numel() == 0) return;
  const auto* added = has_bias ? bias->const_data_ptr<float>() : nullptr;
  if (left.columns == 0) {
    for (int64_t i = 0; i < into.rows; i++)
      for (int64_t j = 0; j < into.columns; j++)
        out.mutable_data_ptr<float>()[i * into.stride + j] = added ? added[j] : 0;
    return;
  }
  at::DataPtr copy;
  multiply_tiles(out.mutable_data_ptr<float>(), into.stride, left, by_rows(right, copy), added);
}

}  // namespace tessera::compiler::codegen
