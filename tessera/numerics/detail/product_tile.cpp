#include "tessera/numerics/detail/product_tile.h"

#include <cmath>

namespace tessera::numerics {
namespace {

// Bytes of a vector register; 0: scalars and std::fma, for processors without fused multiply-add.
template <class T, int kBytes, int kRows, int kVectors>
struct Tile {
  static constexpr int kLanes = kBytes / static_cast<int>(sizeof(T));
  static constexpr int kColumns = kLanes * kVectors;
  typedef T Vector __attribute__((vector_size(kBytes), aligned(alignof(T)), may_alias));

  // It is inlined into functions that name their processor. The file is compiled with -ffp-contract=fast, so the
  // product and the sum become one fused multiply-add there; tests compare the bits with std::fma.
  [[gnu::always_inline]] static inline void run(const T* a, const T* b, const SumStep* steps, int64_t count, T* stack,
                                                T* out, int64_t subtree_stride, int64_t row_stride) {
    Vector* top = reinterpret_cast<Vector*>(stack);
    for (const SumStep* step = steps; step != steps + count; step++) {
      Vector acc[kRows][kVectors] = {};
      for (int64_t k = step->begin; k < step->end; k++) {
        Vector column[kVectors];
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; v++) column[v] = *reinterpret_cast<const Vector*>(b + k * kColumns + v * kLanes);
#pragma GCC unroll 16
        for (int i = 0; i < kRows; i++) {
          const T row = a[k * kRows + i];
#pragma GCC unroll 4
          for (int v = 0; v < kVectors; v++) acc[i][v] += row * column[v];
        }
      }
      for (int merge = 0; merge < step->merges; merge++) {
        top -= kRows * kVectors;
#pragma GCC unroll 16
        for (int i = 0; i < kRows; i++)
#pragma GCC unroll 4
          for (int v = 0; v < kVectors; v++) acc[i][v] = top[i * kVectors + v] + acc[i][v];
      }
      const bool is_subtree = step->subtree >= 0;
      T* to = is_subtree ? out + step->subtree * subtree_stride : reinterpret_cast<T*>(top);
      const int64_t stride = is_subtree ? row_stride : kColumns;
#pragma GCC unroll 16
      for (int i = 0; i < kRows; i++)
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; v++) *reinterpret_cast<Vector*>(to + i * stride + v * kLanes) = acc[i][v];
      if (!is_subtree) top += kRows * kVectors;
    }
  }
};

// The definition, in scalars.
template <class T>
struct ScalarTile {
  static constexpr int kRows = 2, kColumns = 4, kSize = kRows * kColumns;
  static void run(const T* a, const T* b, const SumStep* steps, int64_t count, T* stack, T* out, int64_t subtree_stride,
                  int64_t row_stride) {
    T* top = stack;
    for (const SumStep* step = steps; step != steps + count; step++) {
      T acc[kSize] = {};
      for (int64_t k = step->begin; k < step->end; k++)
        for (int i = 0; i < kSize; i++)
          acc[i] = std::fma(a[k * kRows + i / kColumns], b[k * kColumns + i % kColumns], acc[i]);
      for (int merge = 0; merge < step->merges; merge++) {
        top -= kSize;
        for (int i = 0; i < kSize; i++) acc[i] = top[i] + acc[i];
      }
      T* to = step->subtree < 0 ? top : out + step->subtree * subtree_stride;
      const int64_t stride = step->subtree < 0 ? kColumns : row_stride;
      for (int i = 0; i < kSize; i++) to[i / kColumns * stride + i % kColumns] = acc[i];
      if (step->subtree < 0) top += kSize;
    }
  }
};

#ifdef __x86_64__
template <class T>
using Tile512 = Tile<T, 64, 12, 2>;
template <class T>
using Tile256 = Tile<T, 32, 6, 2>;
template <class T>
__attribute__((target("avx512f,avx512vl,avx512dq,fma"))) void run_512(const T* a, const T* b, const SumStep* steps,
                                                                      int64_t count, T* stack, T* out,
                                                                      int64_t subtree_stride, int64_t row_stride) {
  Tile512<T>::run(a, b, steps, count, stack, out, subtree_stride, row_stride);
}
template <class T>
__attribute__((target("avx2,fma"))) void run_256(const T* a, const T* b, const SumStep* steps, int64_t count, T* stack,
                                                 T* out, int64_t subtree_stride, int64_t row_stride) {
  Tile256<T>::run(a, b, steps, count, stack, out, subtree_stride, row_stride);
}
#endif

}  // namespace

template <class T>
std::vector<TileKernel<T>> tile_kernels() {
  std::vector<TileKernel<T>> kernels;
#ifdef __x86_64__
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
    kernels.push_back({12, Tile512<T>::kColumns, run_512<T>});
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
    kernels.push_back({6, Tile256<T>::kColumns, run_256<T>});
#endif
  kernels.push_back({ScalarTile<T>::kRows, ScalarTile<T>::kColumns, ScalarTile<T>::run});
  return kernels;
}

template std::vector<TileKernel<float>> tile_kernels<float>();
template std::vector<TileKernel<double>> tile_kernels<double>();

}  // namespace tessera::numerics
