#include "tessera/numerics/detail/vector/cpu_kernels.h"

namespace tessera::numerics {

// cpu_kernels_avx512_bf16.cpp, ...
extern const CpuKernels kAvx512Bf16Kernels, kAvx512Kernels, kAvx2Kernels, kBaselineKernels;

AllCpuKernels all_cpu_kernels() {
  AllCpuKernels all = {};
  int count = 0;
#ifdef __x86_64__
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")) {
    if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512bf16"))
      all.kernels[count++] = &kAvx512Bf16Kernels;
    all.kernels[count++] = &kAvx512Kernels;
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) all.kernels[count++] = &kAvx2Kernels;
#endif
  all.kernels[count] = &kBaselineKernels;
  return all;
}

const CpuKernels& cpu_kernels() {
  static const CpuKernels& fastest = *all_cpu_kernels().kernels[0];
  return fastest;
}

}  // namespace tessera::numerics
