#include "tessera/comm/detail/region/widen.h"

#include <bit>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace tessera::comm::region {
namespace {

// Convert eight elements at a time and return how many were converted. The caller converts the rest.
#if defined(__x86_64__)
const bool converts_half = __builtin_cpu_supports("avx2");  // implies F16C, which clang 14 cannot query

__attribute__((target("avx,f16c"))) int64_t widen_eights(const c10::Half* in, float* out, int64_t n) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8)
    _mm256_storeu_ps(out + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(in + i))));
  return i;
}
__attribute__((target("avx,f16c"))) int64_t narrow_eights(const float* in, c10::Half* out, int64_t n) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i),
                     _mm256_cvtps_ph(_mm256_loadu_ps(in + i), _MM_FROUND_TO_NEAREST_INT));
  return i;
}
#else
constexpr bool converts_half = false;
int64_t widen_eights(const c10::Half*, float*, int64_t) { return 0; }
int64_t narrow_eights(const float*, c10::Half*, int64_t) { return 0; }
#endif

}  // namespace

void widen(const c10::Half* in, float* out, int64_t n) {
  for (int64_t i = converts_half ? widen_eights(in, out, n) : 0; i < n; i++) out[i] = static_cast<float>(in[i]);
}
void narrow(const float* in, c10::Half* out, int64_t n) {
  for (int64_t i = converts_half ? narrow_eights(in, out, n) : 0; i < n; i++) out[i] = static_cast<c10::Half>(in[i]);
}

void widen(const c10::BFloat16* in, float* out, int64_t n) {
  for (int64_t i = 0; i < n; i++) out[i] = std::bit_cast<float>(static_cast<uint32_t>(in[i].x) << 16);
}
void narrow(const float* in, c10::BFloat16* out, int64_t n) {
  for (int64_t i = 0; i < n; i++) {
    const uint32_t bits = std::bit_cast<uint32_t>(in[i]);
    const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;  // to nearest, ties to even
    out[i].x = static_cast<uint16_t>((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
  }
}

}  // namespace tessera::comm::region
