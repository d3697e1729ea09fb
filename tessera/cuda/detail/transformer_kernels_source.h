#pragma once

namespace tessera::cuda {

// After kBf16Source. A thread computes 8 elements.
inline constexpr const char* kTransformerSource = R"CUDA(
// table: per position, D / 2 times cosine and sine. sign: 1, or -1 for the gradient.
extern "C" __global__ void __launch_bounds__(256)
rotary(const bf16* x, const float* table, long long vectors, long long row, int length, int width, float sign, bf16* y) {
  const long long v = blockIdx.x * 256ll + threadIdx.x;
  if (v >= vectors) return;
  const int position = (int)(v * 8 / row % length), d = (int)(v * 8 % width);
  const float4* angles = (const float4*)(table + (long long)position * width + d);
  const float4 t0 = angles[0], t1 = angles[1];
  const float c[4] = {t0.x, t0.z, t1.x, t1.z}, s[4] = {t0.y, t0.w, t1.y, t1.w};
  float a[8], b[8];
  get(x + v * 8, a);
  for (int i = 0; i < 4; i++) {
    b[2 * i] = a[2 * i] * c[i] - a[2 * i + 1] * s[i] * sign;
    b[2 * i + 1] = a[2 * i] * s[i] * sign + a[2 * i + 1] * c[i];
  }
  put(y + v * 8, b);
}

__device__ inline float sigmoid(float x) { return 1.f / (1.f + __expf(-x)); }

extern "C" __global__ void __launch_bounds__(256)
swiglu(const bf16* gate, const bf16* up, long long vectors, bf16* y) {
  const long long v = blockIdx.x * 256ll + threadIdx.x;
  if (v >= vectors) return;
  float g[8], u[8];
  get(gate + v * 8, g);
  get(up + v * 8, u);
  for (int i = 0; i < 8; i++) u[i] *= rounded(g[i] * sigmoid(g[i]));
  put(y + v * 8, u);
}

extern "C" __global__ void __launch_bounds__(256)
swiglu_backward(const bf16* grad, const bf16* gate, const bf16* up, long long vectors, bf16* dgate, bf16* dup) {
  const long long v = blockIdx.x * 256ll + threadIdx.x;
  if (v >= vectors) return;
  float d[8], g[8], u[8];
  get(grad + v * 8, d);
  get(gate + v * 8, g);
  get(up + v * 8, u);
  for (int i = 0; i < 8; i++) {
    const float s = sigmoid(g[i]);
    const float dsilu = rounded(d[i] * u[i]);
    u[i] = d[i] * rounded(g[i] * s);
    d[i] = dsilu * s * (1.f + g[i] * (1.f - s));
  }
  put(dgate + v * 8, d);
  put(dup + v * 8, u);
}
)CUDA";

}  // namespace tessera::cuda
