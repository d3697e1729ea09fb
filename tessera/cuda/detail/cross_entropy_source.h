#pragma once

namespace tessera::cuda {

// One block per row. A thread reads 16 bytes at a time, so rows must be aligned to 16 bytes.
inline constexpr const char* kCrossEntropySource = R"CUDA(
#define INFINITY __int_as_float(0x7f800000)
typedef unsigned short bf16;
__device__ inline float as_float(unsigned bits) { return __uint_as_float(bits); }
template <class T> struct Vec;                       // 16 bytes of T
template <> struct Vec<bf16> {
  static const int n = 8;
  uint4 raw;
  __device__ void get(float* x) const {
    const unsigned w[4] = {raw.x, raw.y, raw.z, raw.w};
    for (int i = 0; i < 4; i++) { x[2 * i] = as_float(w[i] << 16); x[2 * i + 1] = as_float(w[i] & 0xffff0000u); }
  }
  __device__ void set(const float* x) {
    unsigned w[4];
    for (int i = 0; i < 4; i++) asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(w[i]) : "f"(x[2 * i + 1]), "f"(x[2 * i]));
    raw = make_uint4(w[0], w[1], w[2], w[3]);
  }
};
template <> struct Vec<float> {
  static const int n = 4;
  uint4 raw;
  __device__ void get(float* x) const {
    x[0] = as_float(raw.x); x[1] = as_float(raw.y); x[2] = as_float(raw.z); x[3] = as_float(raw.w);
  }
  __device__ void set(const float* x) {
    raw = make_uint4(__float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]), __float_as_uint(x[3]));
  }
};
__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(bf16 x) { return as_float((unsigned)x << 16); }

const float kLog2e = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

// (m, s) stands for s * 2^m.
__device__ inline void combine(float& m, float& s, float m2, float s2) {
  const float top = fmaxf(m, m2);
  s = (m == top ? s : s * exp2f(m - top)) + (m2 == top ? s2 : s2 * exp2f(m2 - top));
  m = top;
}

template <class T>
__device__ void forward(const T* logits, const long long* targets, long long classes, long long ignored, float* loss,
                        float* log_sum) {
  const long long row = blockIdx.x;
  const T* x = logits + row * classes;
  const Vec<T>* vectors = (const Vec<T>*)x;
  float m = -INFINITY, s = 0;
  for (long long i = threadIdx.x; i < classes / Vec<T>::n; i += blockDim.x) {
    float v[Vec<T>::n];
    vectors[i].get(v);
    float top = m;
    for (int k = 0; k < Vec<T>::n; k++) { v[k] *= kLog2e; top = fmaxf(top, v[k]); }
    if (top > m) { s *= exp2f(m - top); m = top; }
    if (m == -INFINITY) continue;                     // all are -inf so far
    for (int k = 0; k < Vec<T>::n; k++) s += exp2f(v[k] - m);
  }
  for (int o = 16; o; o >>= 1) {
    const float m2 = __shfl_xor_sync(~0u, m, o), s2 = __shfl_xor_sync(~0u, s, o);
    combine(m, s, m2, s2);
  }
  __shared__ float ms[32], ss[32];
  if (threadIdx.x % 32 == 0) { ms[threadIdx.x / 32] = m; ss[threadIdx.x / 32] = s; }
  __syncthreads();
  if (threadIdx.x) return;
  for (int w = 1; w < blockDim.x / 32; w++) combine(m, s, ms[w], ss[w]);
  const float total = (m + log2f(s)) * kLn2;
  log_sum[row] = total;
  const long long target = targets[row];
  if (target == ignored) { loss[row] = 0; return; }
  if (target < 0 || target >= classes) __trap();      // as LibTorch's kernel
  loss[row] = total - to_float(x[target]);
}

template <class T>
__device__ void backward(const float* grad, long long grad_stride, const T* logits, const long long* targets,
                         const float* log_sum, long long classes, long long ignored, T* out) {
  const long long row = blockIdx.x, target = targets[row];
  const float g = target == ignored ? 0.f : grad[row * grad_stride], base = log_sum[row] * kLog2e;
  const Vec<T>* x = (const Vec<T>*)(logits + row * classes);
  Vec<T>* y = (Vec<T>*)(out + row * classes);
  for (long long i = threadIdx.x; i < classes / Vec<T>::n; i += blockDim.x) {
    float v[Vec<T>::n];
    x[i].get(v);
    for (int k = 0; k < Vec<T>::n; k++) {
      v[k] = exp2f(v[k] * kLog2e - base);
      if (i * Vec<T>::n + k == target) v[k] -= 1.f;
      v[k] = g == 0.f ? 0.f : v[k] * g;
    }
    Vec<T> result;
    result.set(v);
    y[i] = result;
  }
}

#define TESSERA_KERNELS(name, T)                                                                                      \
  extern "C" __global__ void cross_entropy_forward_##name(const T* logits, const long long* targets,                  \
                                                          long long classes, long long ignored, float* loss,          \
                                                          float* log_sum) {                                           \
    forward<T>(logits, targets, classes, ignored, loss, log_sum);                                                     \
  }                                                                                                                   \
  extern "C" __global__ void cross_entropy_backward_##name(const float* grad, long long grad_stride, const T* logits, \
                                                           const long long* targets, const float* log_sum,            \
                                                           long long classes, long long ignored, T* out) {            \
    backward<T>(grad, grad_stride, logits, targets, log_sum, classes, ignored, out);                                  \
  }
TESSERA_KERNELS(bf16, bf16)
TESSERA_KERNELS(f32, float)
)CUDA";

}  // namespace tessera::cuda
