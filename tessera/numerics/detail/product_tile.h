#pragma once
#include "tessera/numerics/detail/sum_tree.h"

#include <cstdint>

// The inner loop of matrix products under Numerics::Invariant: one tile of the result.
//
// Every element of the result is, on every processor and for every tile,
//   acc = fma(a[m][k], b[k][n], acc)  for ascending k of a block, from +0;  then the additions of the sum tree.
// Elements of a tile are independent of each other. So the bits of an element depend on its row of a, its column of b
// and the steps, and not on M, N, the vector width, the number of threads or the position in a tile.
namespace tessera::numerics {

// A kernel for tiles of `rows` x `columns`. `run` computes one tile from packed panels a[k][rows] and b[k][columns].
// It writes row i of subtree s to out + s * subtree_stride + i * row_stride. `stack` has room for stack_depth(steps)
// tiles.
template <class T>
struct TileKernel {
  int64_t rows, columns;
  void (*run)(const T* a, const T* b, const SumStep* steps, int64_t count, T* stack, T* out, int64_t subtree_stride,
              int64_t row_stride);
};

// The kernels that this processor can run, the fastest first. All give the same bits.
template <class T>
std::vector<TileKernel<T>> tile_kernels();

extern template std::vector<TileKernel<float>> tile_kernels<float>();
extern template std::vector<TileKernel<double>> tile_kernels<double>();

}  // namespace tessera::numerics
