#pragma once

namespace tessera::cuda {

// Layer norm, and RMS norm where `mean` (and so bias) is null: y = x * rstd * weight. A warp works on one row at a
// time; a lane holds VECTORS x 8 bf16 of it. VECTORS, the row length / 256, is defined before this source, and
// kBf16Source is.
inline constexpr const char* kLayerNormSource = R"CUDA(
__device__ inline float warp_sum(float x) {
  for (int o = 16; o; o >>= 1) x += __shfl_xor_sync(~0u, x, o);
  return x;
}
const int kLength = VECTORS * 256, kPerLane = VECTORS * 8;

extern "C" __global__ void __launch_bounds__(256)
layer_norm_forward(const bf16* x, const bf16* addend, const bf16* weight, const bf16* bias, float eps, long long rows,
                   bf16* added, bf16* y, float* mean, float* rstd) {
  const int lane = threadIdx.x % 32;
  float w[kPerLane], b[kPerLane];
  for (int v = 0; v < VECTORS; v++) {
    get(weight + (v * 32 + lane) * 8, w + v * 8);
    if (bias) get(bias + (v * 32 + lane) * 8, b + v * 8);
    for (int k = 0; k < 8; k++) b[v * 8 + k] = bias ? b[v * 8 + k] : 0;
  }
  for (long long row = blockIdx.x * 8ll + threadIdx.x / 32; row < rows; row += gridDim.x * 8ll) {
    float a[kPerLane], sum = 0, square = 0;
    for (int v = 0; v < VECTORS; v++) get(x + row * kLength + (v * 32 + lane) * 8, a + v * 8);
    if (addend)
      for (int v = 0; v < VECTORS; v++) {
        const long long at = row * kLength + (v * 32 + lane) * 8;
        float b[8];
        get(addend + at, b);
        for (int k = 0; k < 8; k++) a[v * 8 + k] = rounded(a[v * 8 + k] + b[k]);
        put(added + at, a + v * 8);
      }
    for (int i = 0; i < kPerLane; i++) sum += a[i];
    const float m = mean ? warp_sum(sum) / kLength : 0;
    for (int i = 0; i < kPerLane; i++) square += (a[i] - m) * (a[i] - m);
    const float r = rsqrtf(warp_sum(square) / kLength + eps);
    if (lane == 0) {
      if (mean) mean[row] = m;
      rstd[row] = r;
    }
    for (int i = 0; i < kPerLane; i++) a[i] = (a[i] - m) * r * w[i] + b[i];
    for (int v = 0; v < VECTORS; v++) put(y + row * kLength + (v * 32 + lane) * 8, a + v * 8);
  }
}

// partial: per block, kLength sums for the weight, then, with a mean, kLength for the bias.
extern "C" __global__ void __launch_bounds__(256)
layer_norm_backward(const bf16* dy, const bf16* x, const float* mean, const float* rstd, const bf16* weight,
                    const bf16* addend, long long rows, bf16* dx, float* partial) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  float w[kPerLane], dw[kPerLane], db[kPerLane];
  for (int v = 0; v < VECTORS; v++) get(weight + (v * 32 + lane) * 8, w + v * 8);
  for (int i = 0; i < kPerLane; i++) dw[i] = db[i] = 0;
  for (long long row = blockIdx.x * 8ll + warp; row < rows; row += gridDim.x * 8ll) {
    float a[kPerLane], g[kPerLane], c1 = 0, c2 = 0;
    for (int v = 0; v < VECTORS; v++) {
      get(x + row * kLength + (v * 32 + lane) * 8, a + v * 8);
      get(dy + row * kLength + (v * 32 + lane) * 8, g + v * 8);
    }
    const float m = mean ? mean[row] : 0, r = rstd[row];
    for (int i = 0; i < kPerLane; i++) {
      a[i] = (a[i] - m) * r;
      dw[i] += g[i] * a[i];
      db[i] += g[i];
      g[i] *= w[i];
      c1 += g[i] * a[i];
      c2 += g[i];
    }
    c1 = warp_sum(c1) / kLength;
    c2 = mean ? warp_sum(c2) / kLength : 0;
    for (int i = 0; i < kPerLane; i++) g[i] = r * (g[i] - c2 - a[i] * c1);
    if (addend)
      for (int v = 0; v < VECTORS; v++) {
        float b[8];
        get(addend + row * kLength + (v * 32 + lane) * 8, b);
        for (int k = 0; k < 8; k++) g[v * 8 + k] += b[k];
      }
    for (int v = 0; v < VECTORS; v++) put(dx + row * kLength + (v * 32 + lane) * 8, g + v * 8);
  }
  __shared__ float sums[8][kLength];
  for (int part = 0; part < (mean ? 2 : 1); part++) {
    const float* mine = part ? db : dw;
    __syncthreads();
    for (int v = 0; v < VECTORS; v++)
      for (int k = 0; k < 8; k++) sums[warp][(v * 32 + lane) * 8 + k] = mine[v * 8 + k];
    __syncthreads();
    for (int c = threadIdx.x; c < kLength; c += blockDim.x) {
      float total = 0;
      for (int s = 0; s < 8; s++) total += sums[s][c];
      partial[(blockIdx.x * 2ll + part) * kLength + c] = total;
    }
  }
}

// One block per 32 columns; 8 warps share the blocks of layer_norm_backward.
extern "C" __global__ void layer_norm_sum_partials(const float* partial, int blocks, bf16* dweight, bf16* dbias) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const long long column = blockIdx.x * 32ll + lane;  // of weight, then of bias
  float total = 0;
  for (int b = warp; b < blocks; b += 8) total += partial[b * 2ll * kLength + column];
  __shared__ float sums[8][32];
  sums[warp][lane] = total;
  __syncthreads();
  if (warp) return;
  for (int s = 1; s < 8; s++) total += sums[s][lane];
  unsigned short rounded;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(rounded) : "f"(total));
  (column < kLength ? dweight[column] : dbias[column - kLength]) = rounded;
}
)CUDA";

}  // namespace tessera::cuda
