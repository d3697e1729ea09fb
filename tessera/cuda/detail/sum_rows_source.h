#pragma once

namespace tessera::cuda {

// The sum over the rows of a bf16 matrix. A block sums a part of the rows for 256 columns; then the parts are added in
// order.
inline constexpr const char* kSumRowsSource = R"CUDA(
typedef unsigned short bf16;
extern "C" __global__ void __launch_bounds__(256)
sum_rows_parts(const bf16* x, long long rows, long long columns, int parts, float* partial) {
  const int tiles = (int)((columns + 255) / 256), tile = blockIdx.x % tiles, part = blockIdx.x / tiles;
  const int tx = threadIdx.x % 32, ty = threadIdx.x / 32;
  const long long column = tile * 256ll + tx * 8;
  float sums[8] = {0, 0, 0, 0, 0, 0, 0, 0};
  if (column < columns) {
#pragma unroll 4
    for (long long row = part * 8ll + ty; row < rows; row += parts * 8ll) {
      const uint4 raw = *(const uint4*)(x + row * columns + column);
      const unsigned w[4] = {raw.x, raw.y, raw.z, raw.w};
      for (int i = 0; i < 4; i++) {
        sums[2 * i] += __uint_as_float(w[i] << 16);
        sums[2 * i + 1] += __uint_as_float(w[i] & 0xffff0000u);
      }
    }
  }
  __shared__ float all[8][256];
  for (int k = 0; k < 8; k++) all[ty][tx * 8 + k] = sums[k];
  __syncthreads();
  if (tile * 256ll + threadIdx.x >= columns) return;
  float total = 0;
  for (int s = 0; s < 8; s++) total += all[s][threadIdx.x];
  partial[part * columns + tile * 256ll + threadIdx.x] = total;
}

extern "C" __global__ void __launch_bounds__(256)
sum_rows_total(const float* partial, long long columns, int parts, bf16* out) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const long long column = blockIdx.x * 32ll + lane;
  float total = 0;
  if (column < columns)
    for (int p = warp; p < parts; p += 8) total += partial[p * columns + column];
  __shared__ float sums[8][32];
  sums[warp][lane] = total;
  __syncthreads();
  if (warp || column >= columns) return;
  for (int s = 1; s < 8; s++) total += sums[s][lane];
  unsigned short rounded;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(rounded) : "f"(total));
  out[column] = rounded;
}
)CUDA";

}  // namespace tessera::cuda
