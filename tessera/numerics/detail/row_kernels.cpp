#include "tessera/numerics/detail/row_kernels.h"

#include "tessera/base/detail/parallel.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace tessera::numerics {
namespace {

constexpr int64_t kLanes = 16;
constexpr int64_t kParallelElements = 1 << 15;

// Calls f(first row, rows) for groups of at most kLanes rows, on the threads of this rank.
template <class F>
void for_row_groups(int64_t rows, int64_t n, F f) {
  const int64_t groups = (rows + kLanes - 1) / kLanes;
  const int64_t grain = std::max<int64_t>(1, kParallelElements / std::max<int64_t>(1, n * kLanes));
  parallel_for(0, groups, grain, [&](int64_t begin, int64_t end) { f(begin * kLanes, std::min(rows, end * kLanes)); });
}

// The body of each kernel, on rows [first, last). It is inlined into one function per processor.
template <class T>
struct RowLoops {
  typedef T Lanes __attribute__((vector_size(kLanes * sizeof(T)), aligned(alignof(T)), may_alias));

  // Rows [first, first + count) as to[term][lane]; lanes behind the last row are zero.
  [[gnu::always_inline]] static inline void load(const T* x, int64_t count, int64_t n, T* to) {
    constexpr int64_t kBlock = 16;
    for (int64_t begin = 0; begin < n; begin += kBlock) {
      const int64_t end = std::min(n, begin + kBlock);
      for (int64_t r = 0; r < count; r++)
        for (int64_t k = begin; k < end; k++) to[k * kLanes + r] = x[r * n + k];
      for (int64_t r = count; r < kLanes; r++)
        for (int64_t k = begin; k < end; k++) to[k * kLanes + r] = 0;
    }
  }
  [[gnu::always_inline]] static inline void store(const T* from, int64_t count, int64_t n, T* x) {
    constexpr int64_t kBlock = 16;
    for (int64_t begin = 0; begin < n; begin += kBlock) {
      const int64_t end = std::min(n, begin + kBlock);
      for (int64_t r = 0; r < count; r++)
        for (int64_t k = begin; k < end; k++) x[r * n + k] = from[k * kLanes + r];
    }
  }
  // The tree over a[term], or a[term] * b[term] if b is not null; subtree s goes to out[s * kLanes].
  [[gnu::always_inline]] static inline void sum(const RowSteps& steps, T* stack, T* out, const T* a, const T* b) {
    T* top = stack;
    for (const auto& step : steps.steps) {
      Lanes acc = {};
      if (b)
        for (int64_t k = step.begin; k < step.end; k++) acc += at(a, k) * at(b, k);
      else
        for (int64_t k = step.begin; k < step.end; k++) acc += at(a, k);
      for (int merge = 0; merge < step.merges; merge++) {
        top -= kLanes;
        acc = *reinterpret_cast<const Lanes*>(top) + acc;
      }
      if (step.subtree >= 0) {
        *reinterpret_cast<Lanes*>(out + step.subtree * kLanes) = acc;
      } else {
        *reinterpret_cast<Lanes*>(top) = acc;
        top += kLanes;
      }
    }
  }
  [[gnu::always_inline]] static inline const Lanes& at(const T* terms, int64_t k) {
    return *reinterpret_cast<const Lanes*>(terms + k * kLanes);
  }
  [[gnu::always_inline]] static inline Lanes& at(T* terms, int64_t k) {
    return *reinterpret_cast<Lanes*>(terms + k * kLanes);
  }
  [[gnu::always_inline]] static inline void load_lanes(const T* values, int64_t count, T* lanes) {
    for (int64_t r = 0; r < kLanes; r++) lanes[r] = r < count ? values[r] : T(0);
  }
  static std::vector<T> scratch(const RowSteps& steps, int64_t matrices) {
    return std::vector<T>(static_cast<size_t>((matrices * steps.n + steps.depth) * kLanes));
  }

  struct Sum {
    const T* x;
    const RowSteps& steps;
    int64_t subtrees;
    T* out;
    int64_t subtree_stride;
    [[gnu::always_inline]] inline void run(int64_t first, int64_t last) const {
      const int64_t n = steps.n;
      auto memory = scratch(steps, 1);
      std::vector<T> sums(static_cast<size_t>(subtrees * kLanes));
      T *terms = memory.data(), *stack = terms + n * kLanes;
      for (int64_t row = first; row < last; row += kLanes) {
        const int64_t count = std::min(kLanes, last - row);
        load(x + row * n, count, n, terms);
        sum(steps, stack, sums.data(), terms, nullptr);
        for (int64_t s = 0; s < subtrees; s++)
          std::copy_n(sums.data() + s * kLanes, count, out + s * subtree_stride + row);
      }
    }
  };

  struct Norm {
    const T* x;
    const RowSteps& steps;
    const T *weight, *bias;
    T eps;
    T *y, *mean, *rstd;
    [[gnu::always_inline]] inline void run(int64_t first, int64_t last) const {
      const int64_t n = steps.n;
      const T size = static_cast<T>(n);
      auto memory = scratch(steps, 1);
      T *terms = memory.data(), *stack = terms + n * kLanes;
      for (int64_t row = first; row < last; row += kLanes) {
        const int64_t count = std::min(kLanes, last - row);
        load(x + row * n, count, n, terms);
        if (mean) {
          T m[kLanes];
          sum(steps, stack, m, terms, nullptr);
          at(m, 0) /= size;
          for (int64_t k = 0; k < n; k++) at(terms, k) -= at(m, 0);
          std::copy_n(m, count, mean + row);
        }
        T r[kLanes];
        sum(steps, stack, r, terms, terms);
        for (int64_t i = 0; i < kLanes; i++) r[i] = T(1) / std::sqrt(r[i] / size + eps);
        std::copy_n(r, count, rstd + row);
        for (int64_t k = 0; k < n; k++) {
          Lanes v = at(terms, k) * at(r, 0);
          if (weight) v *= weight[k];
          if (bias) v += bias[k];
          at(terms, k) = v;
        }
        store(terms, count, n, y + row * n);
      }
    }
  };

  struct NormBackward {
    const T *dy, *x;
    const RowSteps& steps;
    const T *weight, *mean, *rstd;
    T *dx, *products;
    [[gnu::always_inline]] inline void run(int64_t first, int64_t last) const {
      const int64_t n = steps.n;
      const T size = static_cast<T>(n);
      auto memory = scratch(steps, 2);
      T *normalized = memory.data(), *g = normalized + n * kLanes, *stack = g + n * kLanes;
      for (int64_t row = first; row < last; row += kLanes) {
        const int64_t count = std::min(kLanes, last - row);
        load(x + row * n, count, n, normalized);
        load(dy + row * n, count, n, g);
        T m[kLanes] = {}, r[kLanes];
        if (mean) load_lanes(mean + row, count, m);
        load_lanes(rstd + row, count, r);
        for (int64_t k = 0; k < n; k++) {
          const Lanes centered = mean ? at(normalized, k) - at(m, 0) : at(normalized, k);
          at(normalized, k) = centered * at(r, 0);
        }
        if (products)
          for (int64_t i = 0; i < count; i++)
            for (int64_t k = 0; k < n; k++)
              products[(row + i) * n + k] = dy[(row + i) * n + k] * normalized[k * kLanes + i];
        if (!dx) continue;
        if (weight)
          for (int64_t k = 0; k < n; k++) at(g, k) *= weight[k];
        T mean_g[kLanes] = {}, mean_gx[kLanes];
        if (mean) {
          sum(steps, stack, mean_g, g, nullptr);
          at(mean_g, 0) /= size;
        }
        sum(steps, stack, mean_gx, g, normalized);
        at(mean_gx, 0) /= size;
        for (int64_t k = 0; k < n; k++) {
          const Lanes centered = mean ? at(g, k) - at(mean_g, 0) : at(g, k);
          at(g, k) = at(r, 0) * (centered - at(normalized, k) * at(mean_gx, 0));
        }
        store(g, count, n, dx + row * n);
      }
    }
  };

  struct Shift {
    T* x;
    int64_t n, queries;
    T scale;
    bool causal;
    T* largest;
    const T* given;
    [[gnu::always_inline]] inline void run(int64_t first, int64_t last) const {
      constexpr T kNone = -std::numeric_limits<T>::infinity();
      for (int64_t row = first; row < last; row++) {
        T* v = x + row * n;
        const int64_t seen = causal ? std::min(n, row % queries + 1) : n;
        T c = kNone;
        for (int64_t k = 0; k < seen; k++) v[k] *= scale;
        if (given) {
          c = given[row];
        } else {
          T part[kLanes];  // the maximum has the same bits in every order, but for NaN, which the sum keeps
          for (auto& each : part) each = kNone;
          int64_t k = 0;
          for (; k + kLanes <= seen; k += kLanes)
            for (int64_t i = 0; i < kLanes; i++) part[i] = v[k + i] > part[i] ? v[k + i] : part[i];
          for (; k < seen; k++) part[0] = v[k] > part[0] ? v[k] : part[0];
          for (const auto each : part) c = each > c ? each : c;
          largest[row] = c;
        }
        for (int64_t k = 0; k < seen; k++) v[k] -= c;
        for (int64_t k = seen; k < n; k++) v[k] = kNone;
      }
    }
  };

  struct DivideBySums {
    T* x;
    const RowSteps& steps;
    T* sums;
    [[gnu::always_inline]] inline void run(int64_t first, int64_t last) const {
      Sum{x, steps, 1, sums, 0}.run(first, last);
      for (int64_t row = first; row < last; row++)
        for (int64_t k = 0; k < steps.n; k++) x[row * steps.n + k] /= sums[row];
    }
  };

  struct ScoreGradients {
    const T* p;
    T* dp;
    int64_t n;
    const T* delta;
    T scale;
    [[gnu::always_inline]] inline void run(int64_t first, int64_t last) const {
      for (int64_t row = first; row < last; row++)
        for (int64_t k = row * n; k < (row + 1) * n; k++) dp[k] = p[k] * (dp[k] - delta[row]) * scale;
    }
  };

  struct Adam {
    T weight_factor, l2, beta1_rest, beta2, beta2_rest, eps, step_size, root_of_correction2, sign;
    T *parameter, *exp_avg, *exp_avg_sq, *largest_sq;
    const T* gradient;
    [[gnu::always_inline]] inline void run(int64_t first, int64_t last) const {
      for (int64_t i = first; i < last; i++) {
        const T p = parameter[i] * weight_factor, g = sign * gradient[i] + l2 * p;
        const T m = exp_avg[i] + beta1_rest * (g - exp_avg[i]);
        const T v = beta2 * exp_avg_sq[i] + beta2_rest * (g * g);
        exp_avg[i] = m;
        exp_avg_sq[i] = v;
        T square = v;
        if (largest_sq) square = largest_sq[i] = v > largest_sq[i] ? v : largest_sq[i];
        parameter[i] = p - step_size * (m / (std::sqrt(square) / root_of_correction2 + eps));
      }
    }
  };
};

// The file is compiled with -ffp-contract=off, so every version gives the same bits.
#ifdef __x86_64__
template <class Loop>
__attribute__((target("avx512f,avx512vl,avx512dq"))) void run_512(const Loop& loop, int64_t first, int64_t last) {
  loop.run(first, last);
}
template <class Loop>
__attribute__((target("avx2"))) void run_256(const Loop& loop, int64_t first, int64_t last) {
  loop.run(first, last);
}
#endif
template <class Loop>
void run_any(const Loop& loop, int64_t first, int64_t last) {
  loop.run(first, last);
}

template <class Loop>
void run_rows(const Loop& loop, int64_t rows, int64_t n) {
  auto* run = run_any<Loop>;
#ifdef __x86_64__
  static const bool has_512 =
      __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  static const bool has_256 = __builtin_cpu_supports("avx2");
  if (has_256) run = run_256<Loop>;
  if (has_512) run = run_512<Loop>;
#endif
  for_row_groups(rows, n, [&](int64_t first, int64_t last) { run(loop, first, last); });
}

}  // namespace

RowSteps row_steps(int64_t n) {
  auto steps = sum_steps(n, {0, n}, kSumBlock);
  const int depth = stack_depth(steps);
  return {n, std::move(steps), depth};
}

template <class T>
void sum_rows(const T* x, int64_t rows, const RowSteps& steps, T* out, int64_t subtree_stride) {
  int64_t subtrees = 0;
  for (const auto& step : steps.steps) subtrees += step.subtree >= 0;
  run_rows(typename RowLoops<T>::Sum{x, steps, subtrees, out, subtree_stride}, rows, steps.n);
}

void norm_rows(const double* x, int64_t rows, const RowSteps& steps, const double* weight, const double* bias,
               double eps, double* y, double* mean, double* rstd) {
  run_rows(RowLoops<double>::Norm{x, steps, weight, bias, static_cast<double>(eps), y, mean, rstd}, rows, steps.n);
}

void norm_backward_rows(const double* dy, const double* x, int64_t rows, const RowSteps& steps, const double* weight,
                        const double* mean, const double* rstd, double* dx, double* products) {
  run_rows(RowLoops<double>::NormBackward{dy, x, steps, weight, mean, rstd, dx, products}, rows, steps.n);
}

void shift_scores(double* x, int64_t rows, int64_t n, int64_t queries, double scale, bool causal, double* largest,
                  const double* given) {
  run_rows(RowLoops<double>::Shift{x, n, queries, static_cast<double>(scale), causal, largest, given}, rows, n);
}

void divide_by_sums(double* x, int64_t rows, const RowSteps& steps, double* sums) {
  run_rows(RowLoops<double>::DivideBySums{x, steps, sums}, rows, steps.n);
}

void score_gradients(const double* p, double* dp, int64_t rows, int64_t n, const double* delta, double scale) {
  run_rows(RowLoops<double>::ScoreGradients{p, dp, n, delta, static_cast<double>(scale)}, rows, n);
}

template <class T>
void adam_elements(const AdamStep& step, int64_t n, T* parameter, const T* gradient, T* exp_avg, T* exp_avg_sq,
                   T* largest_sq) {
  run_rows(typename RowLoops<T>::Adam{static_cast<T>(step.weight_factor), static_cast<T>(step.l2),
                                      static_cast<T>(1 - step.beta1), static_cast<T>(step.beta2),
                                      static_cast<T>(1 - step.beta2), static_cast<T>(step.eps),
                                      static_cast<T>(step.step_size), static_cast<T>(step.root_of_correction2),
                                      static_cast<T>(step.maximize ? -1 : 1), parameter, exp_avg, exp_avg_sq,
                                      largest_sq, gradient},
           n, 1);
}

template void sum_rows(const float*, int64_t, const RowSteps&, float*, int64_t);
template void sum_rows(const double*, int64_t, const RowSteps&, double*, int64_t);
template void adam_elements(const AdamStep&, int64_t, float*, const float*, float*, float*, float*);
template void adam_elements(const AdamStep&, int64_t, double*, const double*, double*, double*, double*);

}  // namespace tessera::numerics
