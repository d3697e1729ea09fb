#pragma once
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cstdint>

namespace tessera::comm::region {

// Converts arrays between the storage dtype and the accumulation dtype.
template <class T, class Sum>
void widen(const T* in, Sum* out, int64_t n) {
  for (int64_t i = 0; i < n; i++) out[i] = static_cast<Sum>(in[i]);
}
template <class T, class Sum>
void narrow(const Sum* in, T* out, int64_t n) {
  for (int64_t i = 0; i < n; i++) out[i] = static_cast<T>(in[i]);
}

// The same results as c10's conversions, but vectorised (float16 if the CPU has F16C). NaN stays NaN, but its payload
// bits may differ.
void widen(const c10::BFloat16* in, float* out, int64_t n);
void narrow(const float* in, c10::BFloat16* out, int64_t n);
void widen(const c10::Half* in, float* out, int64_t n);
void narrow(const float* in, c10::Half* out, int64_t n);

}  // namespace tessera::comm::region
