#pragma once
#include <c10/macros/Macros.h>
#include <c10/util/BFloat16-math.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

// Converts random words of philox.h to values of a distribution. All functions are plain arithmetic in a fixed order,
// so that a value does not depend on the machine or on the sharding of its tensor. The C library's log and cos differ
// in the last bit between machines. ATen's vectorized versions differ between the middle and the end of a buffer. The
// accuracy is a few units in the last place.
namespace tessera::philox {

// The type in which values of T are computed.
template <class T>
using Math = std::conditional_t<std::is_same_v<T, double> || std::is_integral_v<T>, double, float>;
template <class R>
inline constexpr int kWordsPer = std::is_same_v<R, double> ? 2 : 1;

// [0, 1), a multiple of 2^-24 or 2^-53.
template <class R>
C10_ALWAYS_INLINE R unit(const uint32_t* w) {
  if constexpr (std::is_same_v<R, double>)
    return static_cast<double>(static_cast<int64_t>((uint64_t{w[0]} << 32 | w[1]) >> 11)) * 0x1p-53;
  else
    return static_cast<float>(static_cast<int32_t>(w[0] >> 8)) * 0x1p-24f;
}

// (0, 1], with the finest resolution near 0 that the words allow. For arguments of a logarithm.
template <class R>
C10_ALWAYS_INLINE R positive_unit(const uint32_t* w) {
  if constexpr (std::is_same_v<R, double>)
    return (static_cast<double>(static_cast<int64_t>((uint64_t{w[0]} << 32 | w[1]) >> 11)) + 0.5) * 0x1p-53;
  else
    return (static_cast<float>(w[0]) + 0.5f) * 0x1p-32f;
}

// x = m 2^e with m in [sqrt(1/2), sqrt(2));  log m = 2 atanh(s),  s = (m - 1) / (m + 1).  Requires x > 0, normal.
template <class R>
C10_ALWAYS_INLINE R log(R x) {
  using Int = std::conditional_t<std::is_same_v<R, double>, int64_t, int32_t>;
  constexpr int kMantissa = std::numeric_limits<R>::digits - 1, kTerms = std::is_same_v<R, double> ? 10 : 4;
  constexpr auto kSqrtHalf = std::bit_cast<Int>(R(0.70710678118654752440));
  const Int bits = std::bit_cast<Int>(x), e = (bits - kSqrtHalf) >> kMantissa;
  const R m = std::bit_cast<R>(static_cast<Int>(bits - (e << kMantissa)));
  const R s = (m - 1) / (m + 1), s2 = s * s;
  R sum = R(1) / (2 * kTerms + 1);
  for (int k = kTerms - 1; k >= 0; k--) sum = sum * s2 + R(1) / R(2 * k + 1);
  return static_cast<R>(e) * R(0.69314718055994530942) + 2 * s * sum;
}

// sin and cos of 2 pi u for u in [0, 1): u = quarter / 4 + r with |r| <= 1/8, and a Taylor series in r.
template <class R>
struct SinCos {
  R sin, cos;
};
template <class R>
C10_ALWAYS_INLINE SinCos<R> sin_cos_2pi(R u) {
  constexpr int kTerms = std::is_same_v<R, double> ? 8 : 5;
  const auto quarter = static_cast<int32_t>(4 * u + R(0.5));
  const R x = (u - static_cast<R>(quarter) * R(0.25)) * R(6.28318530717958647692), x2 = x * x;
  R s = 1, c = 1;
  for (int k = kTerms; k > 0; k--) {
    s = 1 - s * x2 * (R(1) / R(2 * k * (2 * k + 1)));
    c = 1 - c * x2 * (R(1) / R(2 * k * (2 * k - 1)));
  }
  s *= x;
  const R a = quarter & 1 ? c : s, b = quarter & 1 ? s : c;
  return {quarter & 2 ? -a : a, (quarter + 1) & 2 ? -b : b};
}

// x = k log 2 + r.
template <class R>
C10_ALWAYS_INLINE R exp(R x) {
  constexpr int kTerms = std::is_same_v<R, double> ? 14 : 8;
  const R k = std::floor(x * R(1.44269504088896340736) + R(0.5)), r = x - k * R(0.69314718055994530942);
  R sum = 1;
  for (int i = kTerms; i > 0; i--) sum = 1 + sum * r * (R(1) / R(i));
  return std::ldexp(sum, static_cast<int>(std::fmin(std::fmax(k, R(-2000)), R(2000))));
}

// ---- distributions, as philox::fill takes them ----

// [from, to). The result is never `to`, also not by rounding or in a short type.
template <class T>
struct Uniform {
  using Value = T;
  using R = Math<T>;
  static constexpr int kTakes = kWordsPer<R>, kGives = 1;
  R from, range, most;

  Uniform(double from, double to) : from(static_cast<R>(from)), range(static_cast<R>(to - from)) {
    T below = static_cast<T>(static_cast<R>(to));
    if (static_cast<double>(below) >= to) below = std::nextafter(below, std::numeric_limits<T>::lowest());
    most = std::fmax(static_cast<R>(below), this->from);
  }
  C10_ALWAYS_INLINE void operator()(const uint32_t* w, T* out) const {
    const R v = unit<R>(w) * range + from;
    *out = static_cast<T>(v < most ? v : most);
  }
};

// Box-Muller transform: two uniform values give the length and the angle of a pair of normal values.
template <class R>
C10_ALWAYS_INLINE void normal_pair(const uint32_t* w, R& a, R& b) {
  const R length = std::sqrt(R(-2) * log(positive_unit<R>(w)));
  const auto [sin, cos] = sin_cos_2pi(unit<R>(w + kWordsPer<R>));
  a = length * cos;
  b = length * sin;
}

// Normal values, or with kLog their exponentials.
template <class T, bool kLog>
struct NormalPairs {
  using Value = T;
  using R = Math<T>;
  static constexpr int kTakes = 2 * kWordsPer<R>, kGives = 2;
  R mean, std;
  NormalPairs(double mean, double std) : mean(static_cast<R>(mean)), std(static_cast<R>(std)) {}
  C10_ALWAYS_INLINE void operator()(const uint32_t* w, T* out) const {
    R a, b;
    normal_pair<R>(w, a, b);
    out[0] = convert(a * std + mean);
    out[1] = convert(b * std + mean);
  }
  C10_ALWAYS_INLINE static T convert(R x) {
    if constexpr (kLog) return static_cast<T>(exp(x));
    return static_cast<T>(x);
  }
};
template <class T>
using Normal = NormalPairs<T, false>;
template <class T>
using LogNormal = NormalPairs<T, true>;

template <class T>
struct Exponential {
  using Value = T;
  using R = Math<T>;
  static constexpr int kTakes = kWordsPer<R>, kGives = 1;
  R scale;
  explicit Exponential(double lambda) : scale(static_cast<R>(-1 / lambda)) {}
  // Avoids log(1) = 0, because multinomial divides by the value.
  C10_ALWAYS_INLINE void operator()(const uint32_t* w, T* out) const {
    const R u = positive_unit<R>(w), most = 1 - std::numeric_limits<R>::epsilon() / 2;
    *out = static_cast<T>(log(u < most ? u : most) * scale);
  }
};

template <class T>
struct Cauchy {
  using Value = T;
  using R = Math<T>;
  static constexpr int kTakes = kWordsPer<R>, kGives = 1;
  R median, sigma;
  Cauchy(double median, double sigma) : median(static_cast<R>(median)), sigma(static_cast<R>(sigma)) {}
  // tan(pi (u - 1/2)) = -cos(pi u) / sin(pi u)
  C10_ALWAYS_INLINE void operator()(const uint32_t* w, T* out) const {
    const auto [sin, cos] = sin_cos_2pi(positive_unit<R>(w) * R(0.5));
    *out = static_cast<T>(median - sigma * cos / sin);
  }
};

// The number of trials up to the first success: 1, 2, ...
template <class T>
struct Geometric {
  using Value = T;
  using R = double;
  static constexpr int kTakes = 2, kGives = 1;
  R scale;
  explicit Geometric(double p) : scale(1 / log(1 - p)) {}
  C10_ALWAYS_INLINE void operator()(const uint32_t* w, T* out) const {
    *out = static_cast<T>(std::fmax(std::ceil(log(positive_unit<R>(w)) * scale), 1.0));
  }
};

// True with probability p, to a resolution of 2^-32. Never for p = 0, always for p = 1.
inline bool below(uint32_t word, double p) { return static_cast<double>(word) * 0x1p-32 < p; }

template <class T>
struct Bernoulli {
  using Value = T;
  static constexpr int kTakes = 1, kGives = 1;
  uint32_t most;  // below(word, p) is word <= most, unless p is 0
  explicit Bernoulli(double p) : most(static_cast<uint32_t>(std::ceil(p * 0x1p32) - 1)) {}
  C10_ALWAYS_INLINE void operator()(const uint32_t* w, T* out) const { *out = static_cast<T>(*w <= most ? 1 : 0); }
};

struct Word {
  using Value = uint32_t;
  static constexpr int kTakes = 1, kGives = 1;
  C10_ALWAYS_INLINE void operator()(const uint32_t* w, uint32_t* out) const { *out = *w; }
};

// from .. from + range - 1, range at most 2^32 (0 means 2^32): the high half of word * range.
template <class T>
struct Integer32 {
  using Value = T;
  static constexpr int kTakes = 1, kGives = 1;
  int64_t from;
  uint64_t range;
  C10_ALWAYS_INLINE void operator()(const uint32_t* w, T* out) const {
    *out = static_cast<T>(from + static_cast<int64_t>(*w * range >> 32));
  }
};

// The same for ranges up to 2^64 (0 means 2^64).
template <class T>
struct Integer64 {
  using Value = T;
  static constexpr int kTakes = 2, kGives = 1;
  int64_t from;
  uint64_t range;
  C10_ALWAYS_INLINE void operator()(const uint32_t* w, T* out) const {
    const uint64_t word = uint64_t{w[0]} << 32 | w[1];
    const auto high = range ? static_cast<uint64_t>(static_cast<unsigned __int128>(word) * range >> 64) : word;
    *out = static_cast<T>(static_cast<int64_t>(static_cast<uint64_t>(from) + high));
  }
};

}  // namespace tessera::philox
