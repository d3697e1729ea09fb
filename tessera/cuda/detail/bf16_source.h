#pragma once

namespace tessera::cuda {

// Reads and writes 8 bf16 as floats, and rounds a float to a bf16. Goes before the sources of kernels that use it.
inline constexpr const char* kBf16Source = R"CUDA(
typedef unsigned short bf16;
__device__ inline void get(const bf16* p, float* x) {
  const uint4 raw = *(const uint4*)p;
  const unsigned w[4] = {raw.x, raw.y, raw.z, raw.w};
  for (int i = 0; i < 4; i++) { x[2 * i] = __uint_as_float(w[i] << 16); x[2 * i + 1] = __uint_as_float(w[i] & 0xffff0000u); }
}
__device__ inline void put(bf16* p, const float* x) {
  unsigned w[4];
  for (int i = 0; i < 4; i++) asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(w[i]) : "f"(x[2 * i + 1]), "f"(x[2 * i]));
  *(uint4*)p = make_uint4(w[0], w[1], w[2], w[3]);
}
__device__ inline float rounded(float x) {
  unsigned short bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return __uint_as_float((unsigned)bits << 16);
}
)CUDA";

}  // namespace tessera::cuda
